"""``sglang-k3 cache-report``: ask a running server for its prefix cache, and show it in words and as pictures.

Standard library only, beside the drawing itself.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from sglang_k3.mem.cache_report import ENDPOINT, as_svg, as_text

LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
TIMEOUT_S: Final = 60.0


def run(url: str, svg: Path | None, api_key: str | None, say: Callable[[str], None]) -> None:
    """Print a report per data-parallel rank, and draw it if ``svg`` is given.

    Raises:
        ValueError: the server is not there, refuses, or has nothing to show; says what to do.
    """
    ranks = fetch(url, api_key)
    for rank, report in enumerate(ranks):
        title = f"rank {rank} of {len(ranks)}, " if len(ranks) > 1 else ""
        try:
            text, picture = f"policy {report['policy']}: {as_text(report)}", as_svg(report)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{url} describes its cache otherwise than this sglang-k3 reads it ({error!r}): "
                "use the one that is installed where the server runs."
            ) from None
        say(title + text)
        if svg is not None:
            file = svg if len(ranks) == 1 else svg.with_stem(f"{svg.stem}-{rank}")
            file.write_text(picture, encoding="utf-8")
            say(f"wrote {file}")


def fetch(url: str, api_key: str | None) -> list[Mapping[str, Any]]:
    """The descriptions of all data-parallel ranks, in order.

    Raises:
        ValueError: as ``run``.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isascii():
        raise ValueError(f"{url!r} is no address of a server: give it as http://HOST:PORT.")
    # A proxy of the environment must not see requests to this machine.
    proxies = urllib.request.ProxyHandler({} if parts.hostname in LOOPBACK else None)
    # The address that clients of its API are given will do.
    request = urllib.request.Request(url.rstrip("/").removesuffix("/v1") + ENDPOINT)
    if api_key is not None:
        if not (api_key.isascii() and api_key.isprintable()):
            raise ValueError(f"--api-key {api_key!r} has characters that no HTTP header carries.")
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.build_opener(proxies).open(request, timeout=TIMEOUT_S) as response:
            ranks: list[Mapping[str, Any]] = json.load(response)["ranks"]
            if not isinstance(ranks, list) or not ranks:
                raise ValueError(f"no ranks: {ranks!r}")
    except urllib.error.HTTPError as error:
        raise ValueError(_why_not(url, error.code, error.read())) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ValueError(f"no server answers at {url} ({reason}). Is it up, and is this its address?") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{url} answers with something else than a cache report: no K3 server is there.") from None
    return ranks


def _why_not(url: str, status: int, body: bytes) -> str:
    if status in (401, 403):
        return f"{url} wants a key: give the one that its server was started with, --api-key KEY."
    if status == 404:
        return f"{url} serves no K3 model with this plugin: it has no {ENDPOINT}. Ask a server of `--model kimi-k3`."
    try:
        said = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        said = body.decode("utf-8", errors="replace")[:200]
    return f"{url} answers {status}: {said}"
