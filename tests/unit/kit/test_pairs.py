"""The table of pairs says what tests have shown, and no more."""

from __future__ import annotations

import json

import pytest

from tests.kit import pairs, record_pairs
from tests.kit.configurations import ON_GPU, Configuration
from tests.kit.pairs import Row, cells, in_order, merged, table


def row(*features: str, where: str = "served on a CPU", count: int = 1, test: str = "tests/a.py::test_a") -> Row:
    return Row(test, in_order(features), where, count, "2026-11-30", "abc")


def test_a_test_shows_every_pair_of_its_features() -> None:
    found = cells([row("tp", "abort", "k3", count=2), row("tp", "abort", count=3)])
    assert found[frozenset({"tp", "abort"})] == "5"
    assert found[frozenset({"k3", "abort"})] == found[frozenset({"k3", "tp"})] == "2"
    assert len(found) == 3


@pytest.mark.parametrize(
    ("wheres", "cell"),
    [
        (["served on a CPU", "served on a GPU", "in process"], "1, gpu 1"),
        (["served on a GPU"], "gpu 1"),
        (["in process", "in process"], "(2)"),
        (["refused", "in process"], "refused"),
    ],
)
def test_a_cell_says_where(wheres: list[str], cell: str) -> None:
    assert cells([row("tp", "pp", where=where) for where in wheres]) == {frozenset({"tp", "pp"}): cell}


def test_a_refusal_of_more_than_a_pair_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="the table has pairs"):
        cells([row("tp", "pp", "dp", where="refused")])


def test_what_nobody_has_shown_is_open() -> None:
    lines = table([row("overlap", "chunks")]).splitlines()
    assert lines[2].split(" | ")[1] == "1"
    num_features = len(pairs.FEATURES)
    assert "\n".join(lines).count("open") == num_features * (num_features - 1) // 2 - 1


def test_runs_add_up_and_a_failure_takes_away() -> None:
    old = [
        row("tp", "pp", count=4),
        row("tp", "pp", where="served on a GPU"),
        row("dp", "ep", test="tests/b.py::test_b"),
    ]
    new = merged(old, [row("tp", "pp", count=2)], [row("dp", "ep", test="tests/b.py::test_b")])
    assert [(r.where, r.count) for r in new] == [("served on a CPU", 2), ("served on a GPU", 1)]


def test_a_feature_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"\['tpp'\] are not among .* add it to FEATURES"):
        in_order(["tp", "tpp"])


def test_a_file_holds_what_was_saved(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(pairs, "FILE", tmp_path / "pairs.json")
    assert pairs.load() == []
    pairs.save([row("tp", "pp"), row("dp", "pp", where="refused")])
    assert pairs.load() == [row("tp", "pp"), row("dp", "pp", where="refused")]
    assert len(json.loads(pairs.FILE.read_text())) == 2


@pytest.mark.skipif(ON_GPU, reason="what a GPU serves by default is another thing")
@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ((), {"overlap", "k3"}),
        (("--page-size", "1", "--disable-overlap-schedule"), {"k3"}),
        (("--pp-size", "2", "--page-size", "16"), {"pp", "pages", "k3"}),
        (("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"), {"overlap", "tp", "dp", "k3"}),
        (("--mamba-radix-cache-strategy", "extra_buffer"), {"overlap", "host"}),
        (("--disable-radix-cache", "--chunked-prefill-size", "64"), {"overlap", "chunks"}),
        (("--chunked-prefill-size", "2048"), {"overlap", "k3"}),
    ],
)
def test_flags_say_what_a_server_has(flags: tuple[str, ...], found: set[str]) -> None:
    assert record_pairs.features_of(Configuration("any", flags=flags)) == found
    assert record_pairs.features_of(Configuration("any", flags=flags, dtype="bfloat16")) == found | {"bf16"}


@pytest.mark.parametrize(("flags", "has_pages"), [((), True), (("--page-size", "1"), False)])
def test_a_server_has_pages_where_they_are_the_default(
    flags: tuple[str, ...], has_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_pairs, "DEFAULT_PAGE", "64")
    assert ("pages" in record_pairs.features_of(Configuration("any", flags=flags))) == has_pages


@pytest.mark.covers("abort", "flush")
@pytest.mark.refuses("dp", "pp")
@pytest.mark.parametrize("stream", [True])
@pytest.mark.parametrize("served", [Configuration("tp", flags=("--tp-size", "2", "--disable-radix-cache"))])
def test_a_test_has_the_features_of_its_marks_its_server_and_its_parameters(
    request: pytest.FixtureRequest, stream: bool, served: Configuration
) -> None:
    shown, refused = record_pairs.keys(request.node)
    name = "tests/unit/kit/test_pairs.py::test_a_test_has_the_features_of_its_marks_its_server_and_its_parameters"
    assert shown[0] == refused[0] == name
    assert {"abort", "flush", "stream", "tp", "overlap"} <= {*shown[1]} and shown[2] == "in process"
    assert refused[1:] == (("pp", "dp"), "refused")
