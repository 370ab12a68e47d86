#!/usr/bin/env bash
# Run the GPU tests on the offline GPU host (no network, no SGLang installed): tests/README.md says how.
# Needs .gpu/, the bundle of stock SGLang that make_bundle.sh writes. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
site=$(python3 .gpu/unpack.py "$work")
# The host finds plugins by entry point, so the project has to look installed.
info=$work/plugin/sglang_k3-0.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: sglang-k3\nVersion: 0\n' >"$info/METADATA"
printf '[sglang.srt.plugins]\nk3 = sglang_k3.integration.plugin:register\n' >"$info/entry_points.txt"
export PYTHONPATH=$site:$work/plugin:$PWD HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
python3 -m pytest -p no:cacheprovider "$@"
