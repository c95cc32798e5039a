"""One good request for every surface, and the many that are broken: in their JSON, their forms or their HTTP."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast  # bodies are JSON

import msgspec
import redis

from core.hints import HINT_GROUP

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
EMBEDDINGS, RERANK, IMAGES = "/v1/embeddings", "/v1/rerank", "/v1/images/generations"
TRANSCRIPTIONS, COUNT_MESSAGES = "/v1/audio/transcriptions", "/v1/messages/count_tokens"
COUNT_RESPONSES = "/v1/responses/input_tokens"
NATIVE = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, EMBEDDINGS, RERANK, IMAGES, TRANSCRIPTIONS, "/v1/audio/translations")
"""What a node can answer itself."""
Json = dict[str, Any]

_PICTURE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
_MESSAGES: Json = {
    "max_tokens": 5, "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "metadata": {"user_id": "u"}, "stop_sequences": ["a"], "temperature": 0.5, "top_k": 3,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "tools": [
        {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}, "task_budget": {}},
    "chat_template_kwargs": {"a": 1},
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"}, {"type": "text", "text": "x"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                {"type": "server_tool_use", "id": "q", "name": "web_search", "input": {"query": "x"}},
                {"type": "web_search_tool_result", "tool_use_id": "q", "content": [{"url": "u", "title": "t"}]},
                {"type": "compaction", "content": "c"},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result", "tool_use_id": "t1", "is_error": True,
                    "content": [{"type": "text", "text": "r"}, {"type": "image", "source": _PICTURE}],
                },
                {"type": "document", "title": "t", "source": {"type": "content", "content": [{"type": "text", "text": "x"}]}},
                {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "z"}]},
                {"type": "browser_state", "tabs": [{"a": 1}]},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "z"}], "clear_at": "next_user_message"},
        {"role": "user", "content": "end"},
    ],
}  # fmt: skip
_RESPONSES: Json = {
    "store": False, "instructions": "i", "max_output_tokens": 5, "temperature": 0.1, "top_logprobs": 2,
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "metadata": {"a": "b"},
    "parallel_tool_calls": True, "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "truncation": "auto", "user": "u", "decoding": {"temperature": 1, "top_k": 2, "stop": ["a"], "beam_size": 3},
    "tools": [
        {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "ns", "description": "d", "tools": [{"type": "function", "name": "q"}]},
        {"type": "web_search"},
    ],
    "input": [
        {"role": "developer", "content": "d"},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "x"},
                {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"},
                {"type": "input_file", "file_data": "data:x", "filename": "f"},
            ],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "o", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "namespace": "ns"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "z"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "c", "input": "zz"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "k"},
        {"type": "local_shell_call", "call_id": "c4", "action": {"command": ["ls"]}},
        {"type": "additional_tools", "tools": [{"type": "function", "name": "k"}]}, {"role": "system", "content": "late"},
    ],
}  # fmt: skip
_CHAT: Json = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:AA"}}]},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    ],
    "stream_options": {"include_usage": True}, "max_tokens": 3, "max_completion_tokens": 4,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "x_pool_options": {"prefer_gpu": "a", "max_latency_ms": 3000, "priority": "low"},
}  # fmt: skip
_BODIES: dict[str, Json] = {
    CHAT: _CHAT, COMPLETIONS: {"prompt": ["a", "b"], "max_tokens": 1, "echo": False}, MESSAGES: _MESSAGES,
    RESPONSES: _RESPONSES, EMBEDDINGS: {"input": ["a", "b"], "encoding_format": "float"},
    RERANK: {"query": "q", "documents": ["a", {"text": "x"}], "top_n": 1}, IMAGES: {"prompt": "p", "n": 1},
    COUNT_MESSAGES: {name: value for name, value in _MESSAGES.items() if name != "max_tokens"}, COUNT_RESPONSES: _RESPONSES,
}  # fmt: skip
JSON_SURFACES = tuple(_BODIES)
TALKING = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
"""Surfaces whose answers may be streams."""
TRANSLATED = (MESSAGES, RESPONSES)


def make_body(path: str, model: str) -> Json:
    return {"model": model, **copy.deepcopy(_BODIES[path])}


def make_plain(path: str, model: str) -> Json:
    needed = {"prompt", "query", "documents"} | ({"input"} if path == EMBEDDINGS else set())
    body = {name: value for name, value in make_body(path, model).items() if name in needed or name == "model"}
    if path in {CHAT, MESSAGES, COUNT_MESSAGES}:
        body["messages"] = [{"role": "user", "content": "hi"}]
    if path == MESSAGES:
        body["max_tokens"] = 5
    if path in {RESPONSES, COUNT_RESPONSES}:
        body["input"] = "hi"
    return body


def write(body: Json) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def make_form(model: str) -> tuple[str, bytes]:
    field = b'--xx\r\ncontent-disposition: form-data; name="model"\r\n\r\n' + model.encode()
    sound = b'\r\n--xx\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFFdata\r\n--xx--\r\n'
    return "multipart/form-data; boundary=xx", field + sound


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
    return lambda path, model: Malformed(path, _JSON, change(write(make_plain(path, model))), param)


def _add(more: bytes, *, param: str | None = "*") -> Make:
    return _text(lambda body: body[:-1] + b"," + more + b"}", param=param)


def _item(item: bytes, param: str) -> Make:
    """Return the maker of a body with one item or message, given as JSON text."""

    def make(path: str, model: str) -> Malformed:
        field = "input" if path == RESPONSES else "messages"
        body = make_plain(path, model)
        del body[field]
        return Malformed(path, _JSON, write(body)[:-1] + b',"%b":[%b]}' % (field.encode(), item), param)

    return make


def _form(change: Callable[[str, bytes], tuple[str, bytes]], param: str | None = "*") -> Make:
    def make(_path: str, model: str) -> Malformed:
        kind, body = change(*make_form(model))
        return Malformed(TRANSCRIPTIONS, {"content-type": kind}, body, param)

    return make


EVERYWHERE: dict[str, Make] = {
    "nothing": _text(lambda _: b""), "blanks": _text(lambda _: b" \n\t "),
    "half of it": _text(lambda body: body[: len(body) // 2]), "no JSON": _text(lambda _: b"model=m&messages=hi"),
    "single quotes": _text(lambda body: body.replace(b'"', b"'")), "a comment": _text(lambda body: b"/* hi */" + body),
    "a comma too many": _text(lambda body: body[:-1] + b",}"), "two documents": _text(lambda body: body + body),
    "a NUL behind it": _text(lambda body: body + b"\x00"), "a BOM": _text(lambda body: b"\xef\xbb\xbf" + body),
    "UTF-16": _text(lambda body: body.decode().encode("utf-16")), "a list": _text(lambda body: b"[" + body + b"]"),
    "a text": _text(lambda _: b'"hi"'), "null": _text(lambda _: b"null"), "NaN": _add(b'"x":NaN'),
    "Infinity": _add(b'"x":-Infinity'), "bytes that are not UTF-8": _add(b'"x":"\xff\xfe"'),
    "a key that is not UTF-8": _add(b'"\xff":1'), "a control character in a text": _add(b'"x":"\x01"'),
    "100,000 lists in each other": _add(b'"x":' + b"[" * 100_000 + b"]" * 100_000),
    "100,000 objects in each other": _add(b'"x":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a million lists": lambda path, model: Malformed(
        path, _JSON, write(make_plain(path, model))[:-1] + b',"x":[' + b"[]," * 1_000_000 + b"1]}", None, (413,),
    ),
    "a key twice": _add(b'"x":1,"x":2', param="x"), "a key twice, once in disguise": _add(b'"x":1,"\\u0078":2', param="x"),
    "model twice": _text(lambda body: body[:-1] + b',"model":"m"}', param="model"), "no model": _replaced(model=b""),
    "a number for a model": _replaced(model=b"5"), "null for a model": _replaced(model=b"null"),
    "a model without letters": _replaced(model=b'""'), "a NUL in the model": _replaced(model=b'"a\\u0000b"'),
    "line ends in the model": _replaced(model=b'"a\\r\\nx-evil: 1"'),
    "half a character in the model": lambda path, model: Malformed(
        path, _JSON, write({**make_plain(path, model), "model": "\ud800"}), "*",
    ),
    "a model of a megabyte": _replaced(model=b'"' + b"m" * 1_000_000 + b'"'), "text for stream": _replaced(stream=b'"yes"'),
    "an endless number of tokens": _replaced(max_tokens=b"9" * 5000), "text for max_tokens": _replaced(max_tokens=b'"5"'),
    "half a token": _replaced(max_tokens=b"1.5"), "less than no token": _replaced(max_tokens=b"-1"),
    "a number for x_pool_options": _replaced(x_pool_options=b"5"),
}  # fmt: skip
"""On every JSON surface."""
OF_SOME: dict[tuple[str, ...], dict[str, Make]] = {
    (CHAT, MESSAGES): {
        "text for messages": _replaced(messages=b'"hi"'), "no messages": _replaced(messages=b""),
        "an empty list of messages": _replaced(messages=b"[ ]"),
    },
    (CHAT, MESSAGES, RESPONSES): {
        "an unknown cache mode": lambda path, model: Malformed(
            path, {**_JSON, "x-cache-mode": "all"}, write(make_plain(path, model)), "X-Cache-Mode",
        ),
    },
    TRANSLATED: {"half a character in a text": _item(b'{"role":"user","content":"\\ud800"}', "*")},
    (MESSAGES,): {
        "no max_tokens": _replaced(max_tokens=b""),
        "an unknown role": _item(b'{"role":"king","content":"a"}', "messages[0].role"),
        "a number for content": _item(b'{"role":"user","content":5}', "messages[0].content"),
        "an unknown block": _item(b'{"role":"user","content":[{"type":"hologram"}]}', "messages[0].content[0].type"),
        "a block without its type": _item(b'{"role":"user","content":[{}]}', "messages[0].content[0].type"),
    },
    (RESPONSES,): {
        "no input": _replaced(input=b""), "a number for input": _replaced(input=b"5"),
        "an empty list for input": _replaced(input=b"[]"),
        "an unknown item": _item(b'{"type":"hologram"}', "input[0].type"), "an item that is a number": _item(b"5", "input[0]"),
        "an unknown field of decoding": _add(b'"decoding":{"x":1}', param="decoding.x"),
    },
    (TRANSCRIPTIONS,): {
        "a form that is JSON": _form(lambda _, body: ("application/json", body)),
        "a form without a boundary": _form(lambda _, body: ("multipart/form-data", body)),
        "a boundary of 10 kB": _form(lambda _, body: ("multipart/form-data; boundary=" + "x" * 10_000, body)),
        "a form with another boundary": _form(lambda _, body: ("multipart/form-data; boundary=yy", body)),
        "a form cut short": _form(lambda kind, body: (kind, body[:-20])),
        "a form of a thousand parts": _form(
            lambda kind, body: (kind, b'--xx\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n' * 1000 + body)
        ),
        "a form without a model": _form(lambda kind, body: (kind, body.replace(b'"model"', b'"modal"')), "model"),
        "a form without a file": _form(lambda kind, body: (kind, body.replace(b"; filename", b"; x")), "file"),
        "a part with a megabyte of headers": _form(
            lambda kind, body: (kind, b"--xx\r\na: " + b"b" * 1_000_000 + b"\r\n\r\n\r\n" + body)
        ),
        "nothing for a form": _form(lambda kind, _: (kind, b"")),
    },
}  # fmt: skip
"""On the surfaces named."""


def list_kinds() -> list[tuple[str, str, Make]]:
    everywhere = [(name, path, make) for name, make in EVERYWHERE.items() for path in JSON_SURFACES]
    return everywhere + [(name, path, make) for paths, of in OF_SOME.items() for name, make in of.items() for path in paths]


@dataclass(frozen=True, slots=True)
class Broken:
    """Bytes for a connection. ``statuses``: what may be answered; 0 = the connection is closed without an answer.

    ``leaves``: the client closes its half of the connection behind the bytes.
    """

    data: bytes
    statuses: tuple[int, ...]
    leaves: bool = False


MakeBroken = Callable[[str, str], Broken]
"""Makes the bytes for a key and a model."""


def _head(key: str, *lines: bytes, path: str = CHAT, method: str = "POST") -> bytes:
    """Return a request line and headers; the connection is closed behind the answer, unless they say something of it."""
    start = f"{method} {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {key}\r\n".encode()
    ending = b"" if any(line.startswith(b"connection") for line in lines) else b"connection: close\r\n"
    return start + b"".join(line + b"\r\n" for line in lines) + ending + b"\r\n"


def _ask(
    *lines: bytes, statuses: tuple[int, ...] = (400,), change: Callable[[bytes], bytes] = lambda body: body,
    leaves: bool = False,
) -> MakeBroken:  # fmt: skip
    """Return the maker of a good request with other header lines, of which %d stands for its length."""

    def make(key: str, model: str) -> Broken:
        body = change(write(make_plain(CHAT, model)))
        filled = [line.replace(b"%d", b"%d" % len(body)) for line in lines]
        return Broken(_head(key, b"content-type: application/json", *filled) + body, statuses, leaves)

    return make


def _chunked(body: bytes) -> bytes:
    pieces = [body[start : start + 7] for start in range(0, len(body), 7)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def _get(path: str, statuses: tuple[int, ...], *lines: bytes, method: str = "GET") -> MakeBroken:
    return lambda key, _model: Broken(_head(key, *lines, path=path, method=method), statuses)


KINDS: dict[str, MakeBroken] = {
    "a body in small chunks": _ask(b"transfer-encoding: chunked", change=_chunked, statuses=(200,)),
    "a chunk that is cut": _ask(
        b"transfer-encoding: chunked", change=lambda body: _chunked(body)[:20], statuses=(0, 400), leaves=True,
    ),
    "a chunk without a length": _ask(b"transfer-encoding: chunked", change=lambda body: b"zz\r\n" + body),
    "a chunk of all bytes there are": _ask(b"transfer-encoding: chunked", change=lambda body: b"f" * 17 + b"\r\n" + body),
    "a body shorter than it says": _ask(b"content-length: 100000", statuses=(0, 400), leaves=True),
    "a body longer than it says": _ask(b"content-length: 5", statuses=(0, 400)),
    "a body of 100 MB that is not sent": _ask(b"content-length: 104857600", statuses=(413,)),
    "a length beyond all numbers": _ask(b"content-length: " + b"9" * 40), "a length below zero": _ask(b"content-length: -1"),
    "a length in words": _ask(b"content-length: many"), "two lengths": _ask(b"content-length: %d", b"content-length: 5"),
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
    "an unknown method": _get(CHAT, (400, 405), method="FROBNICATE"), "a surface that is read": _get(CHAT, (405,)),
    "HTTP/3.7": lambda _key, _model: Broken(b"GET / HTTP/3.7\r\n\r\n", (400,)),
    "no HTTP": lambda _key, _model: Broken(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", (0, 400), leaves=True),
    "a path with line ends": _get("/%0A%0A", (404,)), "a path with a NUL": _get("/v1/models/%00", (404,)),
    "a path that is not UTF-8": _get("/v1/models/%FF%FE", (404,)),
    "a path with line ends behind a surface": _get("/v1/responses/a%0Ab", (404,)),
    "a path of 30 kB": _get("/v1/models/" + "a" * 30_000, (404, 414)), "a path upwards": _get("/v1/../../etc/passwd", (404,)),
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
        _ask(
            b"content-length: %d", b"connection: keep-alive", change=lambda body: body[:-1],
        )(key, model).data + _get("/health", (200,))(key, model).data,
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
    good = _ask(b"content-length: %d")(key, model).data
    assert old in good
    return Broken(good.replace(old, new, 1), statuses)


def _in_trailer(key: str, model: str, line: bytes, shown: str = "", *, statuses: tuple[int, ...] = (401,)) -> Broken:
    """Return a chunked request with ``line`` as its trailer, and the key ``shown`` in its head."""
    data = _ask(b"transfer-encoding: chunked", change=_chunked)(key, model).data
    if not shown:
        data = data.replace(f"authorization: Bearer {key}\r\n".encode(), b"", 1)
    return Broken(data.removesuffix(b"\r\n") + line + b"\r\n\r\n", statuses)


_JSON_VALUES: tuple[object, ...] = (
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 2**200, 0.5, -0.0, 1e308, "", "x", "\x00", "\ud800", "é" * 3, "a" * 5000,
    "data:x", "\r\nx: y", [], {}, [[]], [None], [1, "a", {}], {"": {}}, {"type": "text"}, {"type": None}, {"type": 5},
    {"text": "x"}, "text", "user", "assistant", "tool_use", "{", "[", "json_schema", "message", "function_call",
    "item_reference", "reasoning", "custom", "namespace", "stop", "error",
)  # fmt: skip
_KEYS = ("type", "role", "content", "id", "name", "tools", "text", "source", "input", "call_id", "", "\x00", "k" * 3000)
_BYTES = (
    b"", b"\x00", b"\xff", b"\xed\xa0\x80", b'"', b"\\", b"{", b"[", b"]", b"}", b",", b":", b"9" * 400, b"NaN", b"\r\n", b"//",
)  # fmt: skip


def list_places(value: object) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from list_places(inner)


def spoil_tree(rng: random.Random, tree: object, *, values: Sequence[object] = _JSON_VALUES) -> None:
    """Change up to three places of a tree: a value of another type, one from elsewhere, twice, or not at all."""
    for _ in range(rng.randint(1, 3)):
        places = list(list_places(tree))
        if not places:
            return
        holder, key = rng.choice(places)
        action = rng.random()
        if action < 0.15:
            del holder[key]
        elif action < 0.25 and isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        elif action < 0.35:
            other, place = rng.choice(places)
            if isinstance(other, list | dict):
                holder[key] = copy.deepcopy(other[place])
        elif action < 0.45 and isinstance(holder, dict):
            holder[rng.choice(_KEYS)] = copy.deepcopy(rng.choice(values))
        else:
            holder[key] = copy.deepcopy(rng.choice(values))


def spoil_bytes(rng: random.Random, data: bytes) -> bytes:
    """Return a text with a few bytes put in, taken out, doubled, or cut off."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        action = rng.random()
        if action < 0.5:
            data = data[:at] + rng.choice(_BYTES) + data[at + rng.choice([0, 1]) :]
        elif action < 0.7:
            data = data[:at] + data[at + rng.randrange(1, 40) :]
        elif action < 0.85:
            data = data[:at] + data[max(0, at - rng.randrange(1, 60)) :]
        else:
            data = data[:at]
    return data


def spoil_body(rng: random.Random, body: dict[str, Any]) -> bytes:
    body = copy.deepcopy(body)
    if rng.random() < 0.8:
        spoil_tree(rng, body)
    layout = rng.choice([(",", ":"), (", ", ": "), (" ,\n", "\t: ")])
    data = json.dumps(body, separators=layout, ensure_ascii=True).encode()
    return spoil_bytes(rng, data) if rng.random() < 0.3 else data


DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def chunk(delta: Json | None = None, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}], **more})


def call(index: int | None, **function: str) -> Json:
    return {"tool_calls": [{"index": index, "id": f"call_{index}", "function": function}]}


def _continue(arguments: str) -> Json:
    return {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}}]}


GOOD: list[Json] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": None},
    {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "hello"}, "logprobs": {"content": [{"token": "hello", "logprob": -1}]}}]},
    {"choices": [{"index": 0, "delta": call(0, name="f", arguments="")}]}, _continue('{"a":'), _continue("1}"),
    {"choices": [{"index": 0, "delta": call(1, name="g", arguments='{"input":"x"}')}]},
    {"choices": [{"index": 0, "delta": {"refusal": "no"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls", "stop_reason": "END"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}},
]  # fmt: skip
VALUES: tuple[object, ...] = (
    None, True, 0, -1, 2**31, 2**60, 2**63, 2**70, 10**400, 0.5, "", "x", "\x00", "\x7f\u2028", "data: [DONE]", '"}', "{",
    "é" * 400, [], [[]], [None], {}, {"": {}}, {"type": "text"}, "stop", "length", "error", "abort", "assistant",
)  # fmt: skip
_LINES = [
    b"\n", b"\n\n", b"\r", b"\r\n\r\n", b": ping\n\n", b"event: error\n", b"id: 1\n", b"data:\n\n", b"data: {}\n\n", b"\xff",
    DONE, b"data: null\n\n", b"data: [1]\n\n", b'data: {"error":null}\n\n', b'data: {"error":{"code":2e9}}\n\n',
    b'data: {"object":"error","message":"no"}\n\n', b"<html>busy</html>",
]  # fmt: skip


def spoil_stream(rng: random.Random) -> list[bytes]:
    chunks = copy.deepcopy(GOOD)
    if rng.random() < 0.8:
        spoil_tree(rng, chunks, values=VALUES)
    events = [event(content) for content in chunks] + [DONE] * rng.randint(0, 2)
    for _ in range(rng.choice([0, 0, 1, 2])):
        events.insert(rng.randrange(len(events) + 1), rng.choice(_LINES))
    if rng.random() < 0.2:
        rng.shuffle(events)
    stream = b"".join(events)
    if rng.random() < 0.3:
        stream = stream[: rng.randrange(len(stream) + 1)]
    if rng.random() < 0.2:
        stream = stream.replace(b"\n", rng.choice([b"\r\n", b"\r"]))
    if rng.random() < 0.2 and stream:
        at = rng.randrange(len(stream))
        stream = stream[:at] + bytes([rng.randrange(256)]) + stream[at + 1 :]
    cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.choice([0, 1, 5, 40])))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True) if start < end]


def spoil_answer(rng: random.Random) -> tuple[int, str, list[bytes]]:
    """Return status, type and pieces of an answer that is no stream, and was good or an honest error once."""
    message = {"role": "assistant", "content": "hi", "reasoning": "hm", **call(0, name="f", arguments="{}")}
    answer: Json = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": GOOD[-1]["usage"]}
    status = rng.choice([200] * 6 + [201, 204, 302, 400, 404, 418, 422, 429, 500, 503, 599])
    if status >= 400:
        error = {
            "message": "This model's maximum context length is 5 tokens, not 9", "type": "x", "code": status, "param": None,
        }  # fmt: skip
        answer = rng.choice([{"error": error}, {"object": "error", **error}, {"detail": [error]}, {"error": "no"}])
    if rng.random() < 0.8:
        spoil_tree(rng, answer, values=VALUES)
    data = json.dumps(answer).encode()
    if rng.random() < 0.3:
        data = rng.choice([b"", b"\xff" * 9, b"<html><script>x</html>", b"null", data[: rng.randrange(len(data))], data + data])
    half = rng.randrange(len(data) + 1)
    content_type = "application/json" if rng.random() < 0.8 else rng.choice(["", "text/html", "text/event-stream", "a/b\x00"])
    return status, content_type, [piece for piece in (data[:half], data[half:]) if piece]


def _one_by_one(stream: bytes) -> Iterator[bytes]:
    return (stream[at : at + 1] for at in range(len(stream)))


def _in_one_event(count: int) -> bytes:
    return chunk({"tool_calls": [call(n, name="f", arguments="{}")["tool_calls"][0] for n in range(count)]})


FLOODS: dict[str, Callable[[], Iterable[bytes]]] = {
    "an event without an end, byte by byte": lambda: _one_by_one(b"data: " + b"x" * 60_000),
    "a comment without an end, byte by byte": lambda: _one_by_one(b":" * 60_000),
    "line ends": lambda: [b"\r" * 1_000_000, b"\n" * 1_000_000] * 4,
    "data lines of one event": lambda: [b"data: {}\n" * 50_000] * 10,
    "an event larger than any": lambda: [b'data: {"choices":[{"delta":{"content":"', *[b"a" * 65_536] * 600],
    "calls, one an event": lambda: (chunk(call(n, name="f", arguments="{}")) for n in range(30_000)),
    "calls that wait for the first": lambda: (chunk(call(n, name="f")) for n in range(30_000)),
    "calls in one event": lambda: [_in_one_event(40_000)],
    "pieces of calls that never get a name": lambda: (chunk(call(n, arguments="{")) for n in range(30_000)),
    "a million empty calls": lambda: [b'data: {"choices":[{"delta":{"tool_calls":[' + b"{}," * 1_000_000 + b"{}]}}]}\n\n"],
    "a million empty choices": lambda: [b'data: {"choices":[' + b"{}," * 1_000_000 + b"{}]}\n\n"],
    "a million lists": lambda: [b'data: {"choices":[{"delta":{},"logprobs":[' + b"[]," * 1_000_000 + b"[]]}]}\n\n"],
}
"""Streams that no answer comes of, and that may cost no more than their bytes."""


QUEUE = "celery"
QUEUES = (QUEUE, *(f"{QUEUE}\x06\x16{step}" for step in (3, 6, 9)))
PIDBOX = "/{db}.celery.pidbox"
FOREIGN = ("celeryev", "_kombu.binding.celery", "_kombu.binding.celery.pidbox", "unacked", "unacked_index", "unacked_mutex")
KEPT = ("muster.unreadable", "muster.unreadable.total", "muster.unreadable.key")
A_BATCH = 200
_WRONG_TYPE_EVERY = 50
_TASKS = (
    "governance.tasks.work", "nodes.tasks.call_box", "controlplane.tasks.sweep", "celery.map", "celery.chord_unlock",
    "os.system",
)  # fmt: skip
_ODD: tuple[object, ...] = (
    None, True, -1, 2**63, 1.5, "", "\x00", "é" * 99, [], [[]], {}, {"": None}, "2999-01-01T00:00:00+00:00",
)  # fmt: skip


def make_envelope(task: str, args: list[object], **headers: object) -> dict[str, object]:
    ident = str(uuid.uuid4())
    body = json.dumps([args, {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}])
    return {
        "body": base64.b64encode(body.encode()).decode(), "content-encoding": "utf-8", "content-type": "application/json",
        "headers": {"lang": "py", "task": task, "id": ident, "eta": None, "expires": None, "retries": 0, **headers},
        "properties": {
            "correlation_id": ident, "delivery_mode": 2, "delivery_info": {"exchange": "", "routing_key": QUEUE}, "priority": 0,
            "body_encoding": "base64", "delivery_tag": str(uuid.uuid4()),
        },
    }  # fmt: skip


def make_noise(rng: random.Random, *, db: int, hints: bytes) -> tuple[str | bytes | int, ...]:
    chance = rng.random()
    if chance < 1 / _WRONG_TYPE_EVERY:
        return _replace_key(rng)
    if chance < 0.5:
        return ("PUBLISH", hints, _spoil(rng, _make_hint(rng)))
    if chance < 0.55:
        return ("PUBLISH", PIDBOX.format(db=db), _spoil(rng, json.dumps(_make_control(rng)).encode(), odds=0.2))
    return ("LPUSH", rng.choice(QUEUES), _spoil(rng, json.dumps(_make_task(rng)).encode()))


def send_noise(client: redis.Redis, count: int, *, seed: int) -> int:
    """Send so many messages; return how many Valkey took (it refuses what does not fit what stands in a key)."""
    rng = random.Random(seed)
    db, taken = int(client.connection_pool.connection_kwargs.get("db") or 0), 0
    (hints,) = cast("list[bytes]", client.pubsub_channels(f"*{HINT_GROUP}"))
    for first in range(0, count, A_BATCH):
        pipe = client.pipeline(transaction=False)
        for _ in range(min(A_BATCH, count - first)):
            pipe.execute_command(*make_noise(rng, db=db, hints=hints))  # type: ignore[no-untyped-call]  # redis-py
        taken += sum(not isinstance(reply, redis.RedisError) for reply in pipe.execute(raise_on_error=False))
    return taken


def list_spoilt_kinds(rng: random.Random) -> Iterator[bytes]:
    yield b""
    yield b"\xc1"
    yield b"garbage"
    yield rng.randbytes(rng.randrange(1, 200))
    yield b"\x91" * 5000
    yield b"[" * 5000
    yield b'{"a":' * 2000
    yield pickle.dumps({"task": "os.system", "args": ["true"]})
    yield msgspec.msgpack.encode([1, 2, 3])
    yield json.dumps(rng.choice(_ODD)).encode()
    yield b"x" * rng.choice((10, 70_000))


def _make_hint(rng: random.Random) -> bytes:
    hint: dict[object, object] = {"type": "hint", "topic": "operations", "ident": ""}
    for _ in range(rng.randrange(3)):
        hint[rng.choice(["type", "topic", "ident", "", 7])] = rng.choice([*_ODD[:3], *_ODD[4:], "websocket.disconnect"])
    return msgspec.msgpack.encode(hint)


def _make_task(rng: random.Random) -> object:
    args: list[object] = rng.choice([[], [str(uuid.uuid4())], [rng.choice(_ODD)], [[1], {"a": 1}], [str(uuid.uuid4())] * 3])
    message = make_envelope(rng.choice(_TASKS), args)
    for _ in range(rng.randrange(4)):
        part = rng.choice([message, message["headers"], message["properties"]])
        if isinstance(part, dict) and part:
            part[rng.choice(list(part))] = deepcopy(rng.choice([*_ODD, "application/x-python-serialize", "base64"]))
    return message if rng.random() < 0.9 else {**message, "body": base64.b64encode(pickle.dumps([[], {}, {}])).decode()}


def _make_control(rng: random.Random) -> object:
    body: dict[str, object] = {
        "method": rng.choice(["shutdown", "pool_shrink", "rate_limit", "ping"]), "arguments": {}, "destination": None,
    }  # fmt: skip
    return {**make_envelope("", []), "body": base64.b64encode(json.dumps(body).encode()).decode()}


def _spoil(rng: random.Random, data: bytes, *, odds: float = 0.6) -> bytes:
    """Return the data with some of it cut off or changed, something else altogether, or as it is."""
    if rng.random() > odds:
        return data
    choice = rng.random()
    if choice < 0.4:
        return rng.choice(list(list_spoilt_kinds(rng)))
    if choice < 0.7:
        return data[: rng.randrange(len(data))]
    spoilt = bytearray(data)
    for _ in range(rng.randrange(1, 6)):
        spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
    return bytes(spoilt)


def _replace_key(rng: random.Random) -> tuple[str | bytes | int, ...]:
    """Put a value of another type in the place of a key, or empty it: it is a list, a hash, a set, or it is gone."""
    key = rng.choice([*QUEUES, *FOREIGN, *KEPT])
    return rng.choice(
        [
            ("SET", key, "x"), ("HSET", key, "a", "b"), ("SADD", key, "\x06\x16"), ("ZADD", key, 1, "x"), ("LPUSH", key, "x"),
            ("DEL", key),
        ],
    )  # fmt: skip
