"""Rows on completions, embeddings, rerank, transcriptions and images."""

from __future__ import annotations

import base64
import binascii
import io
import math
import struct
import wave

from conformance.dialects import answers
from conformance.engine.answers import TRANSCRIPT, make_vector
from conformance.engine.script import TEXT
from conformance.exchange import LIMITS, Answer, Field, NotApplicable, Violation
from conformance.readers.chat import check_usage, read_completion
from conformance.table import (
    COMPLETIONS,
    EMBEDDINGS,
    FRAGMENT,
    IMAGES,
    RERANK,
    TRANSCRIPTIONS,
    Row,
    Target,
    require_ok,
    require_script_or_skip,
    require_status,
    require_stream,
    scripted,
)

_RATE = 16_000
_BOUNDARY = "muster-conformance-7f3a"


def _make_sound() -> bytes:
    """Return a WAV file with a second of a quiet tone."""
    held = io.BytesIO()
    with wave.open(held, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(_RATE)
        frames = (int(3000 * math.sin(2 * math.pi * 440 * number / _RATE)) for number in range(_RATE))
        out.writeframes(b"".join(struct.pack("<h", frame) for frame in frames))
    return held.getvalue()


async def _send_form(target: Target, fields: dict[str, str], sound: bytes | None) -> Answer:
    fields = {"model": target.model_for(TRANSCRIPTIONS), **fields}
    parts = [
        f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    if sound is not None:
        head = f'--{_BOUNDARY}\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n'
        parts.append(head.encode() + b"content-type: audio/wav\r\n\r\n" + sound + b"\r\n")
    form = b"".join(parts) + f"--{_BOUNDARY}--\r\n".encode()
    headers = {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"}
    return await target.send(target.ask_json(TRANSCRIPTIONS, form, headers))


async def transcribe(target: Target, **fields: str) -> Answer:
    """Send a second of sound."""
    answer = await _send_form(target, fields, _make_sound())
    require_script_or_skip(target, answer, fields.get("response_format", "a recording"))
    return answer


async def _json(target: Target) -> None:
    reply = require_ok(await transcribe(target))
    reply["text"].text()
    if target.scripted:
        reply["text"].must_be(TRANSCRIPT)
        reply["usage"].members()


async def _plain(target: Target) -> None:
    for kind in ("text", "srt", "vtt"):
        answer = await transcribe(target, response_format=kind)
        require_status(answer, 200)
        if "json" in answer.header("content-type") or answer.body.lstrip()[:1] in (b"{", b'"'):
            raise Violation(f"{kind}: {answer.header('content-type')} {answer.body[:60]!r}")
        if kind == "vtt" and not answer.body.startswith(b"WEBVTT"):
            raise Violation(f"vtt begins {answer.body[:30]!r}")


async def _verbose(target: Target) -> None:
    reply = require_ok(await transcribe(target, response_format="verbose_json"))
    reply["text"].text()
    reply["language"].text()
    for segment in reply["segments"].items():
        segment.must_fit({"start": Field.number, "end": Field.number, "text": Field.text})
    if reply["duration"].is_null:
        raise Violation("duration is null")


async def _no_file(target: Target) -> None:
    answer = await _send_form(target, {}, None)
    require_status(answer, 400)
    answer.json()["error"]["param"].must_be("file")


async def _draw(target: Target, **more: object) -> Field:
    body = {"model": target.model_for(IMAGES), "prompt": "a llama", "response_format": "b64_json", **more}
    answer = await target.send(target.ask_json(IMAGES, body))
    require_script_or_skip(target, answer, "images")
    return require_ok(answer)


async def _images(target: Target) -> None:
    reply = await _draw(target)
    reply["created"].count()
    for row in reply["data"].items():
        try:
            base64.b64decode(row["b64_json"].word(), validate=True)
        except binascii.Error as error:
            raise Violation(f"{row.path}.b64_json is no base64: {error}") from None


async def _no_nulls(target: Target) -> None:
    reply = await _draw(target)
    for place in (reply, *reply["data"].items()):
        nulls = [name for name, value in place.members().items() if value is None]
        if nulls:
            raise Violation(f"{place.path}: {', '.join(nulls)} is null")


async def _n(target: Target) -> None:
    if len((await _draw(target, n=2))["data"].items()) != 2:
        raise Violation("n: 2 gives another number of images")


_TEXTS = ["a llama on a hill", "the price of tea"]


async def _embed(target: Target, given: object, **more: object) -> Answer:
    return await target.send(target.ask_json(EMBEDDINGS, {"model": target.model_for(EMBEDDINGS), "input": given, **more}))


def _vectors(reply: Field) -> list[list[float]]:
    return [[number.number() for number in row["embedding"].items()] for row in reply["data"].items()]


async def _reply(target: Target) -> None:
    reply = require_ok(await _embed(target, _TEXTS[0], encoding_format="float"))
    reply.must_fit({"object": "list", "model": Field.word, "data.0.object": "embedding", "data.0.index": 0})
    if not _vectors(reply)[0]:
        raise Violation("the embedding is empty")
    reply.must_fit({"usage.prompt_tokens": Field.count, "usage.total_tokens": Field.count})


async def _list(target: Target) -> None:
    reply = require_ok(await _embed(target, _TEXTS, encoding_format="float"))
    if [row["index"].value for row in reply["data"].items()] != [0, 1]:
        raise Violation(f"index: {[row['index'].value for row in reply['data'].items()]}")
    first, second = _vectors(reply)
    if first == second:
        raise Violation("two texts have the same vector")
    if target.scripted and [first, second] != [make_vector(text) for text in _TEXTS]:
        raise Violation("the vectors are not those of the engine")


async def _base64(target: Target) -> None:
    plain = _vectors(require_ok(await _embed(target, _TEXTS[0], encoding_format="float")))[0]
    answer = await _embed(target, _TEXTS[0], encoding_format="base64")
    require_script_or_skip(target, answer, "base64")
    data = base64.b64decode(require_ok(answer)["data"][0]["embedding"].text())
    packed = struct.unpack(f"<{len(data) // 4}f", data)
    if len(packed) != len(plain) or any(abs(a - b) > LIMITS.tolerance for a, b in zip(packed, plain, strict=True)):
        raise Violation(f"base64 gives {packed[:3]}…, float {plain[:3]}…")


async def _tokens(target: Target) -> None:
    answer = await _embed(target, [[1, 15, 27]], encoding_format="float")
    require_script_or_skip(target, answer, "token numbers")
    if len(_vectors(require_ok(answer))) != 1:
        raise Violation("one input gives more than one vector")


async def _dimensions(target: Target) -> None:
    if len(_vectors(require_ok(await _embed(target, _TEXTS[0], encoding_format="float", dimensions=5)))[0]) != 5:
        raise Violation("5 dimensions were asked for")


async def _rank(target: Target, **more: object) -> Field:
    documents = ["tea in china", "a llama stands on a hill", "nothing of the kind"]
    body = {"model": target.model_for(RERANK), "query": "a llama on a hill", "documents": documents, **more}
    answer = await target.send(target.ask_json(RERANK, body))
    require_script_or_skip(target, answer, "ranking")
    return require_ok(answer)


async def _rerank(target: Target) -> None:
    results = (await _rank(target))["results"].items()
    scores = [result["relevance_score"].number() for result in results]
    if sorted(result["index"].count() for result in results) != [0, 1, 2]:
        raise Violation(f"index: {[result['index'].value for result in results]}")
    if scores != sorted(scores, reverse=True):
        raise Violation(f"the scores are not sorted: {scores}")
    if target.scripted:
        results[0]["index"].must_be(1)


async def _top_n(target: Target) -> None:
    results = (await _rank(target, top_n=1))["results"].items()
    if len(results) != 1:
        raise Violation(f"top_n: 1 gives {len(results)} results")


async def _objects(target: Target) -> None:
    texts = [{"text": text} for text in ("the moon", "the capital of France is Paris")]
    results = (await _rank(target, documents=texts, return_documents=True))["results"].items()
    if sorted(result["index"].count() for result in results) != [0, 1]:
        raise Violation(f"index: {[result['index'].value for result in results]}")


_PROMPTS = [FRAGMENT, "The capital of France is"]


async def _completion(target: Target) -> None:
    reply = require_ok(await target.say(COMPLETIONS))
    reply.must_fit({"object": "text_completion", "id": Field.word, "model": Field.word, "created": Field.count})
    choice = reply["choices"][0]
    choice.must_fit({"index": 0, "text": Field.text, "finish_reason": ("stop", "length", "content_filter")})
    if (logprobs := choice.get("logprobs")) is not None:
        logprobs.members()
    check_usage(reply["usage"])


async def _stream(target: Target) -> None:
    said = read_completion(require_stream(await target.say(COMPLETIONS, stream=True)))
    # llama.cpp puts usage beside the last choice, which no client minds; a chunk without choices is what breaks them.
    if said.usage is not None and (said.usage_is_alone or target.scripted):
        raise Violation("usage that nobody asked for")
    if target.scripted and said.texts != {0: TEXT}:
        raise Violation(f"the text adds up to {said.texts}")


async def _stream_usage(target: Target) -> None:
    said = read_completion(require_stream(await target.say(COMPLETIONS, stream=True, stream_options={"include_usage": True})))
    if said.usage is None:
        raise Violation("no usage")
    if target.scripted and not said.usage_is_alone:
        raise Violation("the chunk with usage has choices")


async def _prompts(target: Target) -> None:
    answer = await target.say(COMPLETIONS, _PROMPTS)
    require_script_or_skip(target, answer, "a list of prompts")
    found = [choice["index"].value for choice in require_ok(answer)["choices"].items()]
    if sorted(found) != [0, 1]:
        raise Violation(f"two prompts give choices with index {found}")


async def _echo(target: Target) -> None:
    for tokens in (0, 1):
        answer = await target.say(COMPLETIONS, _PROMPTS[0], echo=True, logprobs=1, max_tokens=tokens)
        require_script_or_skip(target, answer, "echo with logprobs")
        choice = require_ok(answer)["choices"][0]
        logprobs = choice.get("logprobs")
        if not target.scripted and (
            logprobs is None or "tokens" not in logprobs or not choice["text"].text().startswith("Once")
        ):
            raise NotApplicable("the engine has no echo with logprobs")
        if logprobs is None:
            raise Violation("logprobs are missing")
        if not choice["text"].text().startswith(_PROMPTS[0]):
            raise Violation(f"the text does not begin with the prompt: {choice['text'].shown}")
        lengths = {name: len(logprobs[name].items()) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
        if len(set(lengths.values())) != 1:
            raise Violation(f"the lists of logprobs differ in length: {lengths}")


async def _prompt_tokens(target: Target) -> None:
    answer = await target.say(COMPLETIONS, [1, 15, 27])
    require_script_or_skip(target, answer, "token numbers")
    require_ok(answer)["choices"][0]["text"].text()


ROWS = (
    Row("audio.json", "{text, usage} as JSON", "openai SDKs, Open WebUI", _json),
    Row("audio.plain", "response_format text, srt and vtt are plain text, not JSON", "openai SDKs, subtitle tools", _plain),
    Row("audio.verbose", "verbose_json has duration, language and segments", "openai SDKs", _verbose),
    Row("audio.no_file", "a form without a file: 400 with the field named", "openai SDKs", _no_file),
    Row("images.reply", "{created, data[{b64_json}]}", "openai SDKs, Open WebUI", _images),
    Row("images.no_nulls", "unknown keys are left out, not null", "openai SDKs' types", _no_nulls),
    scripted("images.n", "n gives as many images", "openai SDKs", _n),
    Row("embeddings.reply", "object: list, model, data[] with object, index, embedding; usage with two counts",
        "openai SDKs, LangChain, LlamaIndex", _reply),
    Row("embeddings.list", "a list of texts gives a vector each, index 0 to n-1 in order",
        "LangChain, LlamaIndex, Open WebUI", _list),
    Row("embeddings.base64", "encoding_format: base64 gives little-endian float32 of the same numbers",
        "openai SDKs (their default)", _base64),
    Row("embeddings.tokens", "token numbers as input are taken", "LangChain (it counts tokens itself)", _tokens),
    scripted("embeddings.dimensions", "dimensions reaches the engine", "openai SDKs, Open WebUI", _dimensions),
    Row("rerank.reply", "results[] with index and relevance_score, best first", "Open WebUI, LlamaIndex, Dify", _rerank),
    Row("rerank.top_n", "top_n limits the results", "Open WebUI, LlamaIndex", _top_n),
    scripted("rerank.objects", "documents may be objects with a text, and return_documents is no reason to refuse",
        "Cohere's and Jina's clients, Dify", _objects),
    Row("completions.reply", "object: text_completion, choices with index, text, logprobs, finish_reason; usage",
        "openai SDKs, llm, lm-eval", _completion),
    scripted("completions.text", "the text arrives as the engine said it", "everybody", answers(COMPLETIONS, text=TEXT)),
    Row("completions.stream", "streams like chat with text per chunk, a finish_reason and [DONE]; no usage unless asked for",
        "openai SDKs, Continue, llm", _stream),
    Row("completions.stream.usage", "include_usage: one chunk with choices: [] and usage before [DONE]",
        "openai SDKs, LiteLLM", _stream_usage),
    Row("completions.prompts", "a list of prompts gives choices with index 0 to n-1", "lm-eval, LangChain", _prompts),
    Row("completions.echo", "echo with logprobs and max_tokens 0 or 1 returns the prompt's log probabilities", "lm-eval",
        _echo),
    Row("completions.tokens", "a prompt of token numbers is taken", "lm-eval, guidance", _prompt_tokens),
)  # fmt: skip
