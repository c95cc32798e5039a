"""llm-pool's ``/v1/responses``: its requests as chat completions, chat answers as its JSON and its events."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.definitions.fields import Backend, Decoding, ModelDefinition
from runner.errors import EngineUnavailable, InvalidRequest, ModalityUnsupported, RemoteNotAllowed
from runner.serving import responses
from runner.serving.request import Numbers
from tests.fakes.examples import examples

TEXT = "It rained all night, and the garden looks better for it."
EXAMPLE: dict[str, Any] = {
    "model": "google_gemma-4-26B-A4B-it-Q4_K_M-gguf", "input": TEXT,
    "instructions": "Translate to Dutch. Return only the translation.",
    "stream": False,
    "decoding": {"beam_size": 1, "top_k": 1, "top_p": 1.0, "temperature": 0.1, "repetition_penalty": 1.0, "max_tokens": 256},
}  # fmt: skip
EXAMPLE_METRICS = {
    "backend_inference_wall_ms": 138.1, "engine_total_wall_ms": 138.6, "engine_outside_backend_wall_ms": 0.5,
    "pool_total_wall_ms": 139.0, "engine_tokenize_ms": 0.5, "gpu_time_to_first_token_ms": None, "gpu_generate_total_ms": 138.4,
    "gpu_decode_after_first_token_ms": None, "engine_prompt_tokens": 47, "engine_output_tokens": 23,
    "engine_tokens_per_second": 166.2,
}  # fmt: skip
TRANSLATOR = "translategemma_template"


def model(backend: Backend = "gguf", **fields: Any) -> ModelDefinition:
    """Return a definition of model ``m``."""
    return ModelDefinition(model_id="m", backend=backend, **fields)


def read(fields: object, defaults: Decoding | None = None) -> responses.PoolRequest:
    """Read a request with this body."""
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return responses.read_pool_request(body, defaults=defaults or Decoding())


def ask(**fields: Any) -> responses.PoolRequest:
    """Return a request for model ``m`` with these further fields."""
    return read({"model": "m", "input": TEXT, **fields})


def chat(request: responses.PoolRequest, definition: ModelDefinition) -> dict[str, Any]:
    """Return the body of the chat completion that a request becomes."""
    body: dict[str, Any] = json.loads(responses.to_chat(request, definition).body)
    return body


def events(data: bytes) -> list[dict[str, Any]]:
    """Parse an event stream; the name of each event must be its type."""
    found: list[dict[str, Any]] = []
    for event in data.decode().split("\n\n")[:-1]:
        name, payload = event.split("\n")
        parsed = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {parsed['type']}"
        found.append(parsed)
    return found


def sse(*payloads: object) -> bytes:
    """Return payloads as the events of an engine."""
    texts = (payload if isinstance(payload, str) else json.dumps(payload) for payload in payloads)
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def piece(text: str | None, finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return one chunk of a chat stream."""
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}],
        **fields,
    }


METRICS = responses.make_metrics(Numbers(wall_ms=1.0), pool_ms=1.0)


def test_a_request_is_read_field_by_field_and_what_it_leaves_out_comes_from_the_settings() -> None:
    assert read(EXAMPLE) == responses.PoolRequest(
        model=EXAMPLE["model"], input=TEXT, instructions=EXAMPLE["instructions"], decoding=Decoding(),
        given=frozenset(EXAMPLE["decoding"]),
    )  # fmt: skip
    defaults = Decoding(top_k=7, stop=("END",), max_tokens=99)
    request = read({"model": "m", "input": "x", "decoding": {"max_tokens": 5}}, defaults)
    assert (request.decoding, {*request.given}) == (Decoding(top_k=7, stop=("END",), max_tokens=5), {"max_tokens"})
    assert (request.stream, request.allow_remote, request.instructions) == (False, False, None)


LIMITS: dict[str, tuple[list[object], list[object]]] = {
    "beam_size": ([1, 2, 16], [0, 17, 1.0, True, None, "1"]), "top_k": ([1, 2, 200], [0, 201, -1, 1.5]),
    "top_p": ([0, 0.0, 0.5, 1, 1.0], [-0.001, 1.001, "1", True, None]), "temperature": ([0, 0.1, 2, 2.0], [-0.1, 2.01, None]),
    "repetition_penalty": ([0.001, 1, 5.5], [0, 0.0, -1, None]), "max_tokens": ([1, 256, 4096], [0, 4097, -1, 256.0]),
    "stop": ([[], ["a"], ["\n"] * 16], ["a", [""], [1], ["a"] * 17, None, TEXT, ["", TEXT]]),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_a_decoding_value_within_its_limits_is_taken_and_one_beyond_refused_by_name(name: str) -> None:
    good, bad = LIMITS[name]
    for value in good:
        assert getattr(ask(decoding={name: value}).decoding, name) == (tuple(value) if isinstance(value, list) else value)
    for value in bad:
        with pytest.raises(InvalidRequest) as caught:
            ask(decoding={name: value})
        assert caught.value.param == f"decoding.{name}"
        assert caught.value.message.startswith(f"decoding.{name} must be ")
        assert TEXT not in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "x"}, "model"), ({"model": "m"}, "input"), ({"model": "", "input": "x"}, "model"),
        ({"model": 1, "input": "x"}, "model"), ({"model": "m", "input": ""}, "input"), ({"model": "m", "input": None}, "input"),
        ({"model": "m", "input": [{"role": "user", "content": "x"}]}, "input"),
        ({"model": "m", "input": "x", "instructions": 1}, "instructions"),
        ({"model": "m", "input": "x", "stream": None}, "stream"), ({"model": "m", "input": "x", "stream": "true"}, "stream"),
        ({"model": "m", "input": "x", "allow_remote": 1}, "allow_remote"),
        ({"model": "m", "input": "x", "decoding": None}, "decoding"),
        ({"model": "m", "input": "x", "decoding": []}, "decoding"),
        ({"model": "m", "input": "x", "decoding": {"top_q": 1}}, "decoding.top_q"),
        ({"model": "m", "input": "x", "temperature": 1}, "temperature"),
        ({"model": "m", "input": "x", "source_lang_code": "Dutch!"}, "source_lang_code"),
        ({"model": "m", "input": "x", "target_lang_code": ""}, "target_lang_code"),
    ],
)  # fmt: skip
def test_a_field_that_is_unknown_missing_or_of_a_wrong_type_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(fields)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"model":"m","input":"\xff"}', b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read(body)
    assert not responses.uses_pool_shape(body, on_socket=False)


@pytest.mark.parametrize(
    ("fields", "on_port", "on_socket"),
    [
        (EXAMPLE, True, True), ({"model": "m", "input": "x"}, True, False),
        ({"model": "m", "input": "x", "instructions": "y", "stream": True}, True, False),
        ({"model": "m", "input": "x", "allow_remote": True}, True, True),
        ({"model": "m", "input": ["x"], "allow_remote": True}, False, False),
        ({"model": "m", "input": "x", "source_lang_code": "nl", "target_lang_code": "en"}, True, True),
        ({"model": "m", "input": "x", "decoding": {}, "typo": 1}, True, True),
        ({"model": "m", "decoding": {}}, True, True), ({"model": "m", "input": "x", "temperature": 1}, False, False),
        ({"model": "m", "input": "x", "max_output_tokens": 5}, False, False),
        ({"model": "m", "input": [{"role": "user", "content": "x"}]}, False, False),
        ({"model": "m"}, False, False), ([], False, False),
    ],
)  # fmt: skip
def test_a_body_is_llm_pools_only_when_it_cannot_be_mistaken(fields: object, *, on_port: bool, on_socket: bool) -> None:
    body = json.dumps(fields).encode()
    assert responses.uses_pool_shape(body, on_socket=False) is on_port
    assert responses.uses_pool_shape(body, on_socket=True) is on_socket


def test_a_request_becomes_a_chat_with_instructions_and_input() -> None:
    assert chat(read(EXAMPLE), model()) == {
        "model": EXAMPLE["model"],
        "messages": [{"role": "system", "content": EXAMPLE["instructions"]}, {"role": "user", "content": TEXT}],
        "top_k": 1, "top_p": 1.0, "temperature": 0.1, "repeat_penalty": 1.0, "max_tokens": 256,
    }  # fmt: skip
    own = chat(ask(), model())["messages"]
    assert ([message["role"] for message in own], bool(own[0]["content"])) == (["system", "user"], True)
    assert chat(ask(instructions=""), model())["messages"] == [{"role": "user", "content": TEXT}], "empty ones mean none"
    body = chat(ask(stream=True), model())
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


DECODING = {
    "beam_size": 2, "top_k": 3, "top_p": 0.4, "temperature": 0.5, "repetition_penalty": 1.6, "max_tokens": 7,
    "stop": ["a", "b"],
}  # fmt: skip
OPENAI = {"top_p": 0.4, "temperature": 0.5, "max_tokens": 7, "stop": ["a", "b"]}
SAMPLERS = {**OPENAI, "top_k": 3, "repetition_penalty": 1.6}
LLAMA = {**OPENAI, "top_k": 3, "repeat_penalty": 1.6}
BEAMS = ("decoding.beam_size",)
NOT_OPENAI = ("decoding.beam_size", "decoding.repetition_penalty", "decoding.top_k")
MAPPED: dict[Backend, tuple[dict[str, object], tuple[str, ...]]] = {
    "gguf": (LLAMA, BEAMS), "llama_server": (LLAMA, BEAMS), "ct2": ({**SAMPLERS, "beam_size": 2}, ()),
    "vllm": (SAMPLERS, BEAMS), "exllamav3": (SAMPLERS, BEAMS), "tabbyapi": (SAMPLERS, BEAMS), "tgi": (OPENAI, NOT_OPENAI),
    "attached": (OPENAI, NOT_OPENAI), "openai_compatible": (OPENAI, NOT_OPENAI),
}  # fmt: skip


@pytest.mark.parametrize("backend", MAPPED)
def test_decoding_reaches_each_backend_under_its_own_names_and_the_rest_is_reported(backend: Backend) -> None:
    expected, ignored = MAPPED[backend]
    translation = responses.to_chat(ask(decoding=DECODING, allow_remote=True), model(backend))
    body = json.loads(translation.body)
    assert {name: value for name, value in body.items() if name not in {"model", "messages"}} == expected
    assert translation.ignored == ignored


def test_every_backend_has_a_row_and_only_the_remote_one_must_be_allowed() -> None:
    for backend in get_args(Backend):
        assert responses.POOL_BACKENDS[backend].is_local is (backend != "openai_compatible")
        assert (responses.POOL_BACKENDS[backend].decoding is not None) is (backend in MAPPED)
    assert responses.to_chat(ask(), model("tgi")).ignored == (), "defaults that it has no field for are not reported"
    with pytest.raises(RemoteNotAllowed) as caught:
        responses.to_chat(ask(), model("openai_compatible"))
    assert caught.value.param == "allow_remote"
    embeds = (model("gguf", options={"gguf_embedding": True}), model("vllm", options={"vllm_task": "embed"}))
    for definition in (model("whisper"), model("comfyui"), *embeds):
        with pytest.raises(ModalityUnsupported):
            responses.to_chat(ask(), definition)


LANGUAGES = {"source_lang_code": "nl", "target_lang_code": "pt-BR"}


def test_a_translation_goes_to_each_engine_in_the_form_that_its_template_takes() -> None:
    for llama in ("gguf", "llama_server"):
        body = chat(ask(**LANGUAGES), model(llama, prompt_format=TRANSLATOR))
        assert body["messages"] == [{"role": "user", "content": TEXT}]
        assert body["chat_template_kwargs"] == LANGUAGES
    for backend in ("vllm", "ct2", "exllamav3"):
        body = chat(ask(**LANGUAGES), model(backend, prompt_format=TRANSLATOR))
        assert body["messages"] == [{"role": "user", "content": [{"type": "text", **LANGUAGES, "text": TEXT}]}]
    translation = responses.to_chat(ask(**LANGUAGES, instructions="Be brief."), model(prompt_format=TRANSLATOR))
    assert (translation.ignored, b"Be brief" in translation.body) == (("instructions",), False)
    for name in LANGUAGES:
        for request, template in ((ask(**{**LANGUAGES, name: None}), TRANSLATOR), (ask(**{name: "en"}), "gemma4_template")):
            with pytest.raises(InvalidRequest) as caught:
                responses.to_chat(request, model(prompt_format=template))
            assert caught.value.param == name


def test_a_whole_answer_has_every_field_of_the_specification() -> None:
    builder = responses.ResponseBuilder(model="m")
    choice = {"index": 0, "message": {"role": "assistant", "content": "Het regende."}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 47, "completion_tokens": 23, "prompt_tokens_details": {"cached_tokens": 40}}
    timings = {"prompt_ms": 8.25, "predicted_ms": 130.15, "tokenize_ms": 0.5}
    body = msgspec.json.encode({"id": "c", "choices": [choice], "usage": usage, "timings": timings})
    builder.take_answer(body)
    numbers = Numbers(wall_ms=138.1, queue_wait_ms=0.5)
    numbers.take(body)
    metrics = responses.make_metrics(numbers, pool_ms=139.0)
    assert json.loads(builder.to_json(metrics)) == {
        "id": builder.response_id, "object": "response", "model": "m",
        "output": [{"type": "output_text", "text": "Het regende."}],
        "output_text": "Het regende.", "metrics": {**EXAMPLE_METRICS, "engine_queue_wait_ms": 0.5},
    }  # fmt: skip
    assert numbers.cached_tokens == 40


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not a chat completion"), (b"[]", "not a chat completion"), (b'{"error":"broken"}', "broken"),
        (b'{"choices":[{"message":{"content":["x"]}}]}', "not a chat completion"), (b'{"choices":[]}', "without a message"),
        (b'{"error":{"message":"context is full"}}', "context is full"),
    ],
)  # fmt: skip
def test_an_answer_that_is_none_is_the_engines_failure(body: bytes, words: str) -> None:
    with pytest.raises(EngineUnavailable, match=words):
        responses.ResponseBuilder(model="m").take_answer(body)


@examples(25)
@given(
    texts=st.lists(st.text(min_size=1, max_size=5), max_size=6),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
    line_end=st.sampled_from(["\n", "\r\n"]),
)
def test_a_stream_says_the_same_however_its_bytes_are_cut(texts: list[str], cuts: list[int], line_end: str) -> None:
    data = (b": ping\n\n" + sse(*map(piece, texts), piece(None, "length"), "[DONE]")).replace(b"\n", line_end.encode())
    builder = responses.ResponseBuilder(model="m")
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    out = b"".join(builder.feed(data[start:end]) for start, end in pairwise(edges))
    out += builder.finish(METRICS)
    found = events(out)
    assert [event["delta"] for event in found[:-2]] == texts
    assert found[-1]["response"]["output_text"] == "".join(texts)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (sse({"error": {"message": "out of memory", "code": 500}}), "out of memory"), (sse("not json"), "not a chat stream"),
        (sse({"choices": [{"delta": {"content": 5}}]}), "not a chat stream"), (b"", ""),  # it breaks off
    ],
)  # fmt: skip
def test_a_failure_in_the_stream_ends_it_with_an_error_and_without_completed(data: bytes, words: str) -> None:
    builder = responses.ResponseBuilder(model="m")
    out = builder.begin() + builder.feed(sse(piece("Het "))) + builder.feed(data)
    out += builder.feed(sse(piece("more"))) if data else b""
    out += builder.finish(METRICS) + builder.fail(EngineUnavailable("x"))
    assert [event["type"] for event in events(out)] == ["response.created", "response.output_text.delta", "error"]
    failure = events(out)[-1]["error"]
    assert (failure["code"], words in failure["message"], builder.has_failed) == ("engine_failed", True, True)
