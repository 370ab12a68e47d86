"""A client of a server on this machine: JSON in, JSON or server-sent events out.

Standard library only, so the process that asks stays small.
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import http.client
    from collections.abc import Generator, Iterator

LOOPBACK = ("127.0.0.1", "localhost", "::1")

# A proxy of the environment must not see requests to this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ResponseError(RuntimeError):
    """The server answered with an HTTP error.

    Attributes:
        status: the HTTP status, 400 or above.
        body: the text of the answer.
    """

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url} answered {status}: {body[:2000]}")
        self.status, self.body = status, body


class Client:
    """Asks the server at ``url``.

    Args:
        url: ``http://HOST:PORT`` of this machine, without a path.

    Raises:
        ValueError: ``url`` names another machine.
    """

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "http" or parts.hostname not in LOOPBACK:
            raise ValueError(
                f"url={url!r} is not on this machine: only http://127.0.0.1:PORT and its other names are asked."
            )
        self.url = url.rstrip("/")

    def get_json(self, path: str, *, timeout_s: float = 60.0) -> Any:
        """GET ``path`` and parse the answer.

        Raises:
            ResponseError: the answer is an HTTP error.
        """
        with self._open(path, timeout_s=timeout_s) as response:
            return json.load(response)

    def post_json(self, path: str, body: Any, *, timeout_s: float = 300.0) -> Any:
        """POST ``body`` as JSON to ``path`` and parse the answer (``None`` if it is empty).

        Raises:
            ResponseError: the answer is an HTTP error.
        """
        text = self.post_text(path, body, timeout_s=timeout_s)
        return json.loads(text) if text.strip() else None

    def post_text(self, path: str, body: Any, *, timeout_s: float = 300.0) -> str:
        """POST ``body`` as JSON to ``path`` and return the answer as it is; errors as in ``post_json``."""
        with self._open(path, body=body, timeout_s=timeout_s) as response:
            return response.read().decode("utf-8", errors="replace")

    def stream(self, path: str, body: Any, *, timeout_s: float = 300.0) -> Generator[Any, None, None]:
        """POST ``body`` and yield the server-sent events, parsed, up to ``[DONE]``; closing it early disconnects.

        Raises:
            ResponseError: the answer is an HTTP error.
        """
        with self._open(path, body=body, timeout_s=timeout_s) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                yield json.loads(data)

    @contextlib.contextmanager
    def _open(self, path: str, *, timeout_s: float, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        request = urllib.request.Request(self.url + path)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            response = _OPENER.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise ResponseError(request.full_url, error.code, error.read().decode("utf-8", errors="replace")) from None
        with response:
            yield response
