"""Requests that are not quite HTTP: lengths that lie, bodies cut half-way, headers twice, and too much of anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fakes.request_bodies import CHAT, make_plain, write


@dataclass(frozen=True, slots=True)
class Broken:
    """Bytes for a connection. ``statuses``: what may be answered; 0 = the connection is closed without an answer.

    ``leaves``: the client closes its half of the connection behind the bytes.
    """

    data: bytes
    statuses: tuple[int, ...]
    leaves: bool = False


Make = Callable[[str, str], Broken]
"""Makes the bytes for a key and a model."""


def _head(key: str, *lines: bytes, path: str = CHAT, method: str = "POST") -> bytes:
    """Return a request line and headers; the connection is closed behind the answer, unless they say something of it."""
    start = f"{method} {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {key}\r\n".encode()
    ending = b"" if any(line.startswith(b"connection") for line in lines) else b"connection: close\r\n"
    return start + b"".join(line + b"\r\n" for line in lines) + ending + b"\r\n"


def _ask(
    *lines: bytes,
    statuses: tuple[int, ...] = (400,),
    change: Callable[[bytes], bytes] = lambda body: body,
    leaves: bool = False,
) -> Make:
    """Return the maker of a good request with other header lines, of which %d stands for its length."""

    def make(key: str, model: str) -> Broken:
        body = change(write(make_plain(CHAT, model)))
        filled = [line.replace(b"%d", b"%d" % len(body)) for line in lines]
        return Broken(_head(key, b"content-type: application/json", *filled) + body, statuses, leaves)

    return make


def _chunked(body: bytes, size: int = 7) -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def _get(path: str, statuses: tuple[int, ...], *lines: bytes, method: str = "GET") -> Make:
    return lambda key, _model: Broken(_head(key, *lines, path=path, method=method), statuses)


KINDS: dict[str, Make] = {
    "a body in small chunks": _ask(b"transfer-encoding: chunked", change=_chunked, statuses=(200,)),
    "a chunk that is cut": _ask(
        b"transfer-encoding: chunked", change=lambda body: _chunked(body)[:20], statuses=(0, 400), leaves=True,
    ),
    "a chunk without a length": _ask(b"transfer-encoding: chunked", change=lambda body: b"zz\r\n" + body),
    "a chunk of all bytes there are": _ask(b"transfer-encoding: chunked", change=lambda body: b"f" * 17 + b"\r\n" + body),
    "a body shorter than it says": _ask(b"content-length: 100000", statuses=(0, 400), leaves=True),
    "a body longer than it says": _ask(b"content-length: 5", statuses=(0, 400)),
    "a body of 100 MB that is not sent": _ask(b"content-length: 104857600", statuses=(413,)),
    "a length beyond all numbers": _ask(b"content-length: " + b"9" * 40),
    "a length below zero": _ask(b"content-length: -1"),
    "a length in words": _ask(b"content-length: many"),
    "two lengths": _ask(b"content-length: %d", b"content-length: 5"),
    "a length and chunks": _ask(b"content-length: %d", b"transfer-encoding: chunked", change=_chunked),
    "an unknown transfer encoding": _ask(b"transfer-encoding: gzip", statuses=(0, 400)),
    "chunks under another name": _ask(b"transfer-encoding: chunked, identity", change=_chunked, statuses=(0, 400)),
    "a compressed body": _ask(
        b"content-length: %d", b"content-encoding: gzip", change=lambda body: b"\x1f\x8b" + body, statuses=(415,),
    ),
    "no type at all": lambda key, model: _plain(key, model, b""),
    "an unknown type": lambda key, model: _plain(key, model, b"content-type: application/x-hologram\r\n"),
    "a type of 10 kB": lambda key, model: _plain(key, model, b"content-type: a/" + b"b" * 10_000 + b"\r\n"),
    "a type that is no text": lambda key, model: _plain(key, model, b"content-type: \xff\xfe\r\n"),
    "two keys, the last one wrong": _ask(b"content-length: %d", b"authorization: Bearer mst_x"),
    "two keys in the other header": _ask(b"content-length: %d", b"x-api-key: a", b"x-api-key: b"),
    "a good key in a trailer": lambda key, model: _in_trailer(key, model, b"authorization: Bearer " + key.encode()),
    "a wrong key in a trailer": lambda key, model: _in_trailer(key, model, b"authorization: Bearer x", key, statuses=(200,)),
    "a trailer without end": lambda key, model: _in_trailer(key, model, b"x-a: " + b"b" * 600_000, key, statuses=(0, 431)),
    "no host": lambda key, model: _rewritten(key, model, b"host: gateway\r\n", b""),
    "two hosts": _ask(b"content-length: %d", b"host: localhost"),
    "no host, as HTTP/1.0 allows": lambda key, model: _rewritten(
        key, model, b"HTTP/1.1\r\nhost: gateway\r\n", b"HTTP/1.0\r\n", statuses=(200,),
    ),
    "HTTP/0.9": lambda _key, _model: Broken(b"GET /health\r\n\r\n", (400, 505)),
    "HTTP/1.7": lambda _key, _model: Broken(b"GET /health HTTP/1.7\r\nhost: a\r\n\r\n", (400, 505)),
    "HTTP/2.0": lambda _key, _model: Broken(b"GET /health HTTP/2.0\r\nhost: a\r\n\r\n", (400, 505)),
    "two slashes before the metrics": _get("//metrics", (404,)),
    "three slashes before a peer's path": _get("///internal/v1/nodes/" + "0" * 32 + "/v1/chat/completions", (404,)),
    "an encoded slash before an operator's path": _get("/%2Fadmin/keys", (404,)),
    "a key of 30 kB": lambda _key, model: _ask(b"content-length: %d", statuses=(401,))("m" * 30_000, model),
    "a key of other letters": lambda _key, model: _ask(b"content-length: %d", statuses=(401,))("\u00e9\u00ff", model),
    "100 kB of headers": _ask(b"content-length: %d", b"x-a: " + b"b" * 100_000, statuses=(431,)),
    "1 MB of headers": _ask(b"content-length: %d", b"x-a: " + b"b" * 1_000_000, statuses=(0, 400, 431)),
    "5000 headers": _ask(b"content-length: %d", *[b"x-%d: b" % n for n in range(5000)], statuses=(200, 400, 431)),
    "a folded header": _ask(b"content-length: %d", b"x-a: b\r\n c", statuses=(200, 400)),
    "a header with a NUL": _ask(b"content-length: %d", b"x-a: \x00"),
    "a header without a colon": _ask(b"content-length: %d", b"nonsense"),
    "a header with a bare CR": _ask(b"content-length: %d", b"x-a: b\rx-b: c"),
    "an unknown method": _get(CHAT, (400, 405), method="FROBNICATE"),
    "a surface that is read": _get(CHAT, (405,)),
    "HTTP/3.7": lambda _key, _model: Broken(b"GET / HTTP/3.7\r\n\r\n", (400,)),
    "no HTTP": lambda _key, _model: Broken(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", (0, 400), leaves=True),
    "a path with line ends": _get("/%0A%0A", (404,)),
    "a path with a NUL": _get("/v1/models/%00", (404,)),
    "a path that is not UTF-8": _get("/v1/models/%FF%FE", (404,)),
    "a path with line ends behind a surface": _get("/v1/responses/a%0Ab", (404,)),
    "a path of 30 kB": _get("/v1/models/" + "a" * 30_000, (404, 414)),
    "a path upwards": _get("/v1/../../etc/passwd", (404,)),
    "a query of a thousand parameters": _get("/v1/models?" + "&".join(f"a{n}=b" for n in range(1000)), (200,)),
    "the same to Anthropic's list": _get(
        "/v1/models?" + "&".join(f"a{n}=b" for n in range(1000)), (400,), b"anthropic-version: 1",
    ),
    "a limit of letters": _get("/v1/models?limit=%FF", (400,), b"anthropic-version: 1"),
    "a response of no name": _get("/v1/responses/%00", (404,)),
    "items of a response of no name": _get("/v1/responses/resp_a/input_items?order=%00", (404,)),
    "a limit below zero": _get("/v1/responses/resp_a/input_items?limit=-1", (400,)),
    "an upgrade": _ask(b"content-length: %d", b"connection: upgrade", b"upgrade: h2c"),
    "an expectation": _ask(b"content-length: %d", b"expect: 200-ok", statuses=(200, 400, 417)),
    "two requests at once, the first broken": lambda key, model: Broken(
        _ask(b"content-length: %d", b"connection: keep-alive", change=lambda body: body[:-1])(key, model).data
        + _get("/health", (200,))(key, model).data,
        (400,),
    ),
}  # fmt: skip
"""By what is wrong. Some are not wrong at all, only strange, and are served."""


def _plain(key: str, model: str, line: bytes) -> Broken:
    """Return a good request with another header line for its type: without one JSON is read as what it is."""
    body = write(make_plain(CHAT, model))
    head = _head(key, b"content-length: %d" % len(body))[:-2] + line + b"\r\n"
    return Broken(head + body, (415,) if line else (200,))


def _rewritten(key: str, model: str, old: bytes, new: bytes, *, statuses: tuple[int, ...] = (400,)) -> Broken:
    """Return a good request with ``new`` in the place of ``old``."""
    good = _ask(b"content-length: %d")(key, model).data
    assert old in good
    return Broken(good.replace(old, new, 1), statuses)


def _in_trailer(key: str, model: str, line: bytes, shown: str = "", *, statuses: tuple[int, ...] = (401,)) -> Broken:
    """Return a chunked request with ``line`` as its trailer, and the key ``shown`` in its head."""
    data = _ask(b"transfer-encoding: chunked", change=_chunked)(key, model).data
    if not shown:
        data = data.replace(f"authorization: Bearer {key}\r\n".encode(), b"", 1)
    return Broken(data.removesuffix(b"\r\n") + line + b"\r\n\r\n", statuses)
