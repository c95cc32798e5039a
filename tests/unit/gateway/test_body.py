from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.dialects import SURFACES
from gateway.dialects.body import read_fields, replace_fields
from gateway.errors import BadRequest
from gateway.values import Priority

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
KEYS = st.text(st.sampled_from('ab"\\é\n😀'), max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)
LAYOUTS = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t"), (",  ", ":")])


def write(pairs: list[tuple[str, object]], layout: tuple[str, str], *, ascii_only: bool) -> bytes:
    comma, colon = layout
    parts = [
        json.dumps(key, ensure_ascii=ascii_only) + colon + json.dumps(value, separators=layout, ensure_ascii=ascii_only)
        for key, value in pairs
    ]
    return ("{" + comma.join(parts) + "}").encode()


@given(st.lists(st.tuples(KEYS, VALUES), max_size=6), LAYOUTS, st.booleans())
@example([("a", 1), ("b", 2), ("c", 3), ("d", 4), ("a", 12)], (",", ":"), False)
@example([("model", "a"), ("model", "a")], (", ", ": "), True)
def test_a_key_is_refused_exactly_when_it_is_given_twice(
    pairs: list[tuple[str, object]], layout: tuple[str, str], ascii_only: bool
) -> None:
    body = write(pairs, layout, ascii_only=ascii_only)
    names = [key for key, _value in pairs]
    if len(set(names)) == len(names):
        assert {key: json.loads(bytes(raw)) for key, raw in read_fields(body).items()} == dict(pairs)
        return
    with pytest.raises(BadRequest, match="given twice") as caught:
        read_fields(body)
    assert caught.value.param in {name for name in names if names.count(name) > 1}


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"allowed","messages":[{}],"model":"other"}',
        b'{"model":"allowed", "messages":[{}], "m\\u006fdel":"other"}',
        b'{"messages":[{}],\n\t"model":"x","model":"x"}',
    ],
)
def test_a_model_named_twice_is_refused_before_any_rule_looks_at_it(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        SURFACES[CHAT].parse(body, {})
    assert caught.value.param == "model"


def test_another_model_stands_in_the_body_and_nothing_else_changes() -> None:
    surface = SURFACES[CHAT]
    body = b'{"seed":1e2,"model":"a\\u00e9","messages":[{"role":"user","content":"\\ud83d\\ude00 "}],"x":{"a":1.0}}'
    renamed = surface.rename(surface.parse(body, {}), "other")
    assert renamed.model == "other"
    assert renamed.body == body.replace(b'"a\\u00e9"', b'"other"')
    assert surface.rename(renamed, "other") is renamed
    assert replace_fields(b'{"a":1,"b":2}', drop="a") == b'{"b":2}'


def test_another_model_stands_in_the_form_and_the_file_stays_as_it_is() -> None:
    surface = SURFACES["/v1/audio/transcriptions"]
    sound = bytes(range(256)) * 700  # over the size of one piece of the parser
    form = (
        b'--xx\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + sound + b"\r\n"
        b'--xx\r\ncontent-disposition: form-data; name="model"\r\n\r\nwhisper-1\r\n'
        b'--xx\r\ncontent-disposition: form-data; name="language"\r\n\r\nwhisper-1\r\n--xx--\r\n'
    )
    request = surface.parse(form, {"content-type": "multipart/form-data; boundary=xx"})
    renamed = surface.rename(request, "tiny-whisper")
    assert renamed.body == form.replace(b"\r\n\r\nwhisper-1", b"\r\n\r\ntiny-whisper", 1)
    assert surface.parse(renamed.body, renamed.headers).model == "tiny-whisper"


def test_pool_options_are_read_and_never_reach_a_box() -> None:
    options = {"prefer_gpu": "gpu-1", "max_latency_ms": 500, "fallback_models": ["a", "b"], "priority": "low", "new": 1}
    request = SURFACES[CHAT].parse(json.dumps({"model": "m", "x_pool_options": options, "messages": HELLO}).encode(), {})
    assert json.loads(request.body) == {"model": "m", "messages": HELLO}
    found = request.options
    assert found is not None
    assert (found.prefer_gpu, found.max_latency_ms, found.fallback_models, found.priority) == (
        "gpu-1", 500, ("a", "b"), Priority.LOW,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"prefer_gpu": 7}, "x_pool_options.prefer_gpu"),
        ({"max_latency_ms": "1"}, "x_pool_options.max_latency_ms"),
        ({"max_latency_ms": -1}, "x_pool_options.max_latency_ms"),
        ({"max_latency_ms": 3_600_001}, "x_pool_options.max_latency_ms"),
        ({"fallback_models": "a"}, "x_pool_options.fallback_models"),
        ({"fallback_models": ["a"] * 9}, "x_pool_options.fallback_models"),
        ({"priority": "urgent"}, "x_pool_options.priority"),
        ([], "x_pool_options"),
    ],
)
def test_pool_options_that_cannot_be_read_are_refused_by_name(options: object, param: str) -> None:
    body = json.dumps({"model": "m", "messages": HELLO, "x_pool_options": options}).encode()
    with pytest.raises(BadRequest) as caught:
        SURFACES[CHAT].parse(body, {})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"model": "m"}, "prompt"),
        ("/v1/embeddings", {"model": "m", "input": []}, "input"),
        ("/v1/embeddings", {"model": "m", "input": ""}, "input"),
        ("/v1/responses", {"model": "m"}, "input"),
        ("/v1/rerank", {"model": "m", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"model": "m", "query": ["a"], "documents": ["a"]}, "query"),
        ("/v1/rerank", {"model": "m", "query": "a", "documents": []}, "documents"),
        ("/v1/messages", {"model": "m", "max_tokens": 1, "messages": []}, "messages"),
        (CHAT, {"model": "m", "messages": HELLO, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
def test_a_body_without_what_its_surface_needs_is_refused_by_name(path: str, fields: dict[str, object], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        SURFACES[path].parse(json.dumps(fields).encode(), {})
    assert caught.value.param == param


def test_prompt_text_of_every_surface_counts_tools_and_instructions_too() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 100}}]
    bodies: dict[str, dict[str, object]] = {
        CHAT: {"messages": HELLO, "tools": tools},
        "/v1/responses": {"input": "hi", "tools": tools, "instructions": "i" * 50},
        "/v1/rerank": {"query": "q" * 60, "documents": ["d" * 60]},
    }
    for path, fields in bodies.items():
        assert SURFACES[path].parse(json.dumps({"model": "m", **fields}).encode(), {}).prompt_chars > 100, path
