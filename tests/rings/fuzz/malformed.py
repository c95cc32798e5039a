"""Malformed requests by kind: what is wrong with each, and which field the refusal has to name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.rings.fuzz.bodies import (
    CHAT,
    JSON_SURFACES,
    MESSAGES,
    RESPONSES,
    TRANSCRIPTIONS,
    TRANSLATED,
    make_form,
    make_plain,
    write,
)


@dataclass(frozen=True, slots=True)
class Malformed:
    """A request that is refused. ``param``: the field that has to be named, None = there is none, "*" = any may be."""

    path: str
    headers: dict[str, str]
    body: bytes
    param: str | None = "*"
    statuses: tuple[int, ...] = (400,)


Make = Callable[[str, str], Malformed]
"""Makes a request for a path and a model."""
_JSON = {"content-type": "application/json"}


def _replaced(**fields: bytes) -> Make:
    """Return the maker of a good body with other values, as JSON text, of some fields; empty = left out."""
    (param,) = list(fields)[:1]

    def make(path: str, model: str) -> Malformed:
        body = make_plain(path, model)
        for name in fields:
            body.pop(name, None)
        more = b"".join(b',"%b":%b' % (name.encode(), value) for name, value in fields.items() if value)
        return Malformed(path, _JSON, write(body)[:-1] + more + b"}", param)

    return make


def _text(change: Callable[[bytes], bytes], *, param: str | None = "*") -> Make:
    """Return the maker of a good body that is changed as a text."""
    return lambda path, model: Malformed(path, _JSON, change(write(make_plain(path, model))), param)


def _add(more: bytes, *, param: str | None = "*") -> Make:
    """Return the maker of a good body with further members."""
    return _text(lambda body: body[:-1] + b"," + more + b"}", param=param)


def _form(change: Callable[[str, bytes], tuple[str, bytes]], param: str | None = "*") -> Make:
    def make(_path: str, model: str) -> Malformed:
        kind, body = change(*make_form(model))
        return Malformed(TRANSCRIPTIONS, {"content-type": kind}, body, param)

    return make


EVERYWHERE: dict[str, Make] = {
    "nothing": _text(lambda _: b""),
    "blanks": _text(lambda _: b" \n\t "),
    "half of it": _text(lambda body: body[: len(body) // 2]),
    "no JSON": _text(lambda _: b"model=m&messages=hi"),
    "single quotes": _text(lambda body: body.replace(b'"', b"'")),
    "a comment": _text(lambda body: b"/* hi */" + body),
    "a comma too many": _text(lambda body: body[:-1] + b",}"),
    "two documents": _text(lambda body: body + body),
    "a NUL behind it": _text(lambda body: body + b"\x00"),
    "a BOM": _text(lambda body: b"\xef\xbb\xbf" + body),
    "UTF-16": _text(lambda body: body.decode().encode("utf-16")),
    "a list": _text(lambda body: b"[" + body + b"]"),
    "a text": _text(lambda _: b'"hi"'),
    "null": _text(lambda _: b"null"),
    "NaN": _add(b'"x":NaN'),
    "Infinity": _add(b'"x":-Infinity'),
    "bytes that are not UTF-8": _add(b'"x":"\xff\xfe"'),
    "a key that is not UTF-8": _add(b'"\xff":1'),
    "a control character in a text": _add(b'"x":"\x01"'),
    "100,000 lists in each other": _add(b'"x":' + b"[" * 100_000 + b"]" * 100_000),
    "100,000 objects in each other": _add(b'"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a million lists": lambda path, model: Malformed(
        path, _JSON, write(make_plain(path, model))[:-1] + b',"x":[' + b"[]," * 1_000_000 + b"1]}", None, (413,)
    ),
    "a key twice": _add(b'"x":1,"x":2', param="x"),
    "a key twice, once in disguise": _add(b'"x":1,"\\u0078":2', param="x"),
    "model twice": _text(lambda body: body[:-1] + b',"model":"m"}', param="model"),
    "no model": _replaced(model=b""),
    "a number for a model": _replaced(model=b"5"),
    "null for a model": _replaced(model=b"null"),
    "a model without letters": _replaced(model=b'""'),
    "a NUL in the model": _replaced(model=b'"a\\u0000b"'),
    "line ends in the model": _replaced(model=b'"a\\r\\nx-evil: 1"'),
    "half a character in the model": lambda path, model: Malformed(
        path, _JSON, write({**make_plain(path, model), "model": "\ud800"}), "*"
    ),
    "a model of a megabyte": _replaced(model=b'"' + b"m" * 1_000_000 + b'"'),
    "text for stream": _replaced(stream=b'"yes"'),
    "an endless number of tokens": _replaced(max_tokens=b"9" * 5000),
    "text for max_tokens": _replaced(max_tokens=b'"5"'),
    "half a token": _replaced(max_tokens=b"1.5"),
    "less than no token": _replaced(max_tokens=b"-1"),
    "a number for x_pool_options": _replaced(x_pool_options=b"5"),
}
"""On every JSON surface."""
OF_SOME: dict[str, tuple[tuple[str, ...], Make]] = {
    "text for messages": ((CHAT, MESSAGES), _replaced(messages=b'"hi"')),
    "no messages": ((CHAT, MESSAGES), _replaced(messages=b"")),
    "an empty list of messages": ((CHAT, MESSAGES), _replaced(messages=b"[ ]")),
    "no max_tokens": ((MESSAGES,), _replaced(max_tokens=b"")),
    "no input": ((RESPONSES,), _replaced(input=b"")),
    "a number for input": ((RESPONSES,), _replaced(input=b"5")),
    "an empty list for input": ((RESPONSES,), _replaced(input=b"[]")),
    "an unknown role": (
        (MESSAGES,), lambda path, model: _at(path, model, b'{"role":"king","content":"a"}', "messages[0].role"),
    ),
    "a number for content": (
        (MESSAGES,), lambda path, model: _at(path, model, b'{"role":"user","content":5}', "messages[0].content"),
    ),
    "an unknown block": (
        (MESSAGES,),
        lambda path, model: _at(path, model, b'{"role":"user","content":[{"type":"hologram"}]}', "messages[0].content[0].type"),
    ),
    "a block without its type": (
        (MESSAGES,), lambda path, model: _at(path, model, b'{"role":"user","content":[{}]}', "messages[0].content[0].type"),
    ),
    "half a character in a text": (
        TRANSLATED, lambda path, model: _at(path, model, b'{"role":"user","content":"\\ud800"}', "*"),
    ),
    "an unknown item": ((RESPONSES,), lambda path, model: _at(path, model, b'{"type":"hologram"}', "input[0].type")),
    "an item that is a number": ((RESPONSES,), lambda path, model: _at(path, model, b"5", "input[0]")),
    "an unknown field of decoding": ((RESPONSES,), _add(b'"decoding":{"x":1}', param="decoding.x")),
    "an unknown cache mode": (
        (CHAT, MESSAGES, RESPONSES),
        lambda path, model: Malformed(path, {**_JSON, "x-cache-mode": "all"}, write(make_plain(path, model)), "X-Cache-Mode"),
    ),
    "a form that is JSON": ((TRANSCRIPTIONS,), _form(lambda _kind, body: ("application/json", body))),
    "a form without a boundary": ((TRANSCRIPTIONS,), _form(lambda _kind, body: ("multipart/form-data", body))),
    "a boundary of 10 kB": (
        (TRANSCRIPTIONS,), _form(lambda _kind, body: ("multipart/form-data; boundary=" + "x" * 10_000, body)),
    ),
    "a form with another boundary": ((TRANSCRIPTIONS,), _form(lambda _kind, body: ("multipart/form-data; boundary=yy", body))),
    "a form cut short": ((TRANSCRIPTIONS,), _form(lambda kind, body: (kind, body[:-20]))),
    "a form of a thousand parts": (
        (TRANSCRIPTIONS,),
        _form(lambda kind, body: (kind, b'--xx\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n' * 1000 + body)),
    ),
    "a form without a model": (
        (TRANSCRIPTIONS,), _form(lambda kind, body: (kind, body.replace(b'"model"', b'"modal"')), "model"),
    ),
    "a form without a file": ((TRANSCRIPTIONS,), _form(lambda kind, body: (kind, body.replace(b"; filename", b"; x")), "file")),
    "a part with a megabyte of headers": (
        (TRANSCRIPTIONS,), _form(lambda kind, body: (kind, b"--xx\r\na: " + b"b" * 1_000_000 + b"\r\n\r\n\r\n" + body)),
    ),
    "nothing for a form": ((TRANSCRIPTIONS,), _form(lambda kind, _body: (kind, b""))),
}  # fmt: skip
"""On the surfaces named."""


def _at(path: str, model: str, item: bytes, param: str) -> Malformed:
    """Return a request whose conversation is one item."""
    field = b"input" if path == RESPONSES else b"messages"
    body = make_plain(path, model)
    del body[field.decode()]
    return Malformed(path, _JSON, write(body)[:-1] + b',"%b":[%b]}' % (field, item), param)


def list_kinds() -> list[tuple[str, str, Make]]:
    """Return every kind with every path it is for: name, path, maker."""
    everywhere = [(name, path, make) for name, make in EVERYWHERE.items() for path in JSON_SURFACES]
    return everywhere + [(name, path, make) for name, (paths, make) in OF_SOME.items() for path in paths]
