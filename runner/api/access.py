"""Who may use the port: whoever has the key, or, without one, programs of this machine, but no web page in a browser."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from runner.api.refusals import render
from runner.config import ApiConfig
from runner.errors import AccessRefused, RequestRefused

OPEN_PATHS = frozenset({"/health"})
"""Needs no key: what watches a container has none."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class ForeignPage(RequestRefused):
    """A request that a web page of another origin, or of a rebound name, had a browser send."""

    code = "forbidden"
    status = 403


class AccessGuard:
    """ASGI middleware in front of every route."""

    def __init__(self, app: ASGIApp, *, config: ApiConfig) -> None:
        self._app = app
        self._key = config.key.encode()
        self._hosts = _LOOPBACK | {config.host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self._check(scope["path"], Headers(scope=scope))
        except RequestRefused as refusal:
            await render(refusal, path=scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        if self._key:
            if path not in OPEN_PATHS and not self._has_key(headers):
                # LiteLLM takes a 401 for what it is by the words "Incorrect API key provided".
                raise AccessRefused(
                    "Incorrect API key provided: send the API key of this node as 'Authorization: Bearer KEY' "
                    "or as 'x-api-key: KEY'."
                )
            return
        self._refuse_pages(headers)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer.strip()] if scheme.lower() == "bearer" else []
        return any(hmac.compare_digest(key.encode(), self._key) for key in [*given, headers.get("x-api-key", "")])

    def _refuse_pages(self, headers: Headers) -> None:
        """Without a key, being on this machine is what lets a request in, and a page in the owner's browser is there too."""
        if _host_name(headers.get("host", "")) not in self._hosts:
            raise ForeignPage(
                "This port answers to localhost and to the address it is bound to; the Host header names another."
            )
        origins = headers.getlist("origin")
        if origins and not self._are_own(origins, headers.get("host", "")):
            raise ForeignPage("A web page of another origin may not use this box; set an API key to let programs of yours in.")

    def _are_own(self, origins: Iterable[str], host: str) -> bool:
        return all(origin.lower() in {f"http://{host.lower()}", f"https://{host.lower()}"} for origin in origins)


def _host_name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""
