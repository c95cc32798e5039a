"""Rows on embeddings and rankings."""

from __future__ import annotations

import base64
import struct

from conformance.engine.media import make_vector
from conformance.exchange import Answer
from conformance.fields import Field
from conformance.limits import LIMITS
from conformance.table import requirement
from conformance.target import EMBEDDINGS, RERANK, Target, require_ok, require_script_or_skip
from conformance.verdicts import Violation

_TEXTS = ["a llama on a hill", "the price of tea"]


async def _embed(target: Target, given: object, **more: object) -> Answer:
    return await target.send(target.ask_json(EMBEDDINGS, {"model": target.model_for(EMBEDDINGS), "input": given, **more}))


def _vectors(reply: Field) -> list[list[float]]:
    return [[number.number() for number in row["embedding"].items()] for row in reply["data"].items()]


@requirement(
    "embeddings.reply",
    "object: list, model, data[] with object, index, embedding; usage with two counts",
    clients="openai SDKs, LangChain, LlamaIndex",
)
async def _reply(target: Target) -> None:
    reply = require_ok(await _embed(target, _TEXTS[0], encoding_format="float"))
    reply["object"].must_be("list")
    reply["model"].word()
    row = reply["data"][0]
    row["object"].must_be("embedding")
    row["index"].must_be(0)
    if not _vectors(reply)[0]:
        raise Violation("the embedding is empty")
    reply["usage"]["prompt_tokens"].count()
    reply["usage"]["total_tokens"].count()


@requirement(
    "embeddings.list",
    "a list of texts gives a vector each, index 0 to n-1 in order",
    clients="LangChain, LlamaIndex, Open WebUI",
)
async def _list(target: Target) -> None:
    reply = require_ok(await _embed(target, _TEXTS, encoding_format="float"))
    if [row["index"].value for row in reply["data"].items()] != [0, 1]:
        raise Violation(f"index: {[row['index'].value for row in reply['data'].items()]}")
    first, second = _vectors(reply)
    if first == second:
        raise Violation("two texts have the same vector")
    if target.scripted and [first, second] != [make_vector(text) for text in _TEXTS]:
        raise Violation("the vectors are not those of the engine")


@requirement(
    "embeddings.base64",
    "encoding_format: base64 gives little-endian float32 of the same numbers",
    clients="openai SDKs (their default)",
)
async def _base64(target: Target) -> None:
    plain = _vectors(require_ok(await _embed(target, _TEXTS[0], encoding_format="float")))[0]
    answer = await _embed(target, _TEXTS[0], encoding_format="base64")
    require_script_or_skip(target, answer, "base64")
    data = base64.b64decode(require_ok(answer)["data"][0]["embedding"].text())
    packed = struct.unpack(f"<{len(data) // 4}f", data)
    if len(packed) != len(plain) or any(abs(a - b) > LIMITS.tolerance for a, b in zip(packed, plain, strict=True)):
        raise Violation(f"base64 gives {packed[:3]}…, float {plain[:3]}…")


@requirement("embeddings.tokens", "token numbers as input are taken", clients="LangChain (it counts tokens itself)")
async def _tokens(target: Target) -> None:
    answer = await _embed(target, [[1, 15, 27]], encoding_format="float")
    require_script_or_skip(target, answer, "token numbers")
    if len(_vectors(require_ok(answer))) != 1:
        raise Violation("one input gives more than one vector")


@requirement("embeddings.dimensions", "dimensions reaches the engine", clients="openai SDKs, Open WebUI", needs_script=True)
async def _dimensions(target: Target) -> None:
    if len(_vectors(require_ok(await _embed(target, _TEXTS[0], encoding_format="float", dimensions=5)))[0]) != 5:
        raise Violation("5 dimensions were asked for")


async def _rank(target: Target, **more: object) -> Field:
    documents = ["tea in china", "a llama stands on a hill", "nothing of the kind"]
    body = {"model": target.model_for(RERANK), "query": "a llama on a hill", "documents": documents, **more}
    answer = await target.send(target.ask_json(RERANK, body))
    require_script_or_skip(target, answer, "ranking")
    return require_ok(answer)


@requirement("rerank.reply", "results[] with index and relevance_score, best first", clients="Open WebUI, LlamaIndex, Dify")
async def _rerank(target: Target) -> None:
    results = (await _rank(target))["results"].items()
    scores = [result["relevance_score"].number() for result in results]
    if sorted(result["index"].count() for result in results) != [0, 1, 2]:
        raise Violation(f"index: {[result['index'].value for result in results]}")
    if scores != sorted(scores, reverse=True):
        raise Violation(f"the scores are not sorted: {scores}")
    if target.scripted:
        results[0]["index"].must_be(1)


@requirement("rerank.top_n", "top_n limits the results", clients="Open WebUI, LlamaIndex")
async def _top_n(target: Target) -> None:
    results = (await _rank(target, top_n=1))["results"].items()
    if len(results) != 1:
        raise Violation(f"top_n: 1 gives {len(results)} results")


@requirement(
    "rerank.objects",
    "documents may be objects with a text, and return_documents is no reason to refuse",
    clients="Cohere's and Jina's clients, Dify",
    needs_script=True,
)
async def _objects(target: Target) -> None:
    texts = [{"text": text} for text in ("the moon", "the capital of France is Paris")]
    results = (await _rank(target, documents=texts, return_documents=True))["results"].items()
    if sorted(result["index"].count() for result in results) != [0, 1]:
        raise Violation(f"index: {[result['index'].value for result in results]}")
