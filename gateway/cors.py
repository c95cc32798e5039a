"""Letting pages of other origins call the API from a browser. Source: WHATWG Fetch, "CORS protocol".

Keys travel in a header that a page has to set itself, never in a cookie, so an origin that is let in gets nothing that whoever
wrote its page does not have; credentials mode is not offered.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from core.limits import limits
from gateway.request.client import ClientConnection
from gateway.values import Header

EVERYBODY = "*"
ORIGIN_RE = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]-]+\Z")
"""Scheme, host and port as browsers send them: in small letters, without a path."""
_HEADER_NAMES_RE = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~ ,-]{0,1000}\Z")
_METHODS = b"GET, HEAD, POST, DELETE"


def admit_origin(headers: Mapping[str, str], origins: Collection[str]) -> tuple[Header, ...]:
    """Return the headers that let the page which asks read the answer; none for other clients and other pages.

    ``origins``: the ones that are let in; ``EVERYBODY`` among them stands for all.
    """
    if not origins:
        return ()
    if EVERYBODY in origins:
        return ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", b"*"))
    origin = headers.get("origin", "")
    vary: Header = (b"vary", b"Origin")
    if origin not in origins:
        return (vary,)
    return ((b"access-control-allow-origin", origin.encode("latin-1")), (b"access-control-expose-headers", b"*"), vary)


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    """Whether a browser asks if a page may send a request."""
    return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def answer_preflight(client: ClientConnection) -> None:
    """Say which requests a page may send; without the headers of ``admit_origin``, which the client adds, it is a no."""
    asked = client.headers.get("access-control-request-headers", "")
    extra: list[Header] = [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-max-age", b"%d" % limits().gateway.preflight_age_s),
    ]
    if asked and _HEADER_NAMES_RE.match(asked):
        extra.append((b"access-control-allow-headers", asked.encode("ascii")))
    client.respond(204, extra, b"")
