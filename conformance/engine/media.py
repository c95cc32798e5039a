"""Embeddings, rankings, transcripts and images: fixed answers with just enough in them to be checked."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any  # answers are JSON

from conformance.engine.chat import CREATED
from conformance.limits import LIMITS

Json = dict[str, Any]
TRANSCRIPT = "Good morning, dear llama."
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\nscripted").decode()


def embed(body: Mapping[str, Any]) -> Json:
    """Return a vector for each input: little-endian float32 in base64 when asked, else numbers."""
    inputs = _list_inputs(body.get("input"))
    length = int(body.get("dimensions") or LIMITS.dimensions)
    vectors = [make_vector(text, length) for text in inputs]
    if body.get("encoding_format") == "base64":
        shown: list[Any] = [base64.b64encode(struct.pack(f"<{length}f", *vector)).decode() for vector in vectors]
    else:
        shown = list(vectors)
    count = 3 * len(inputs)
    return {
        "object": "list",
        "model": body.get("model", "scripted"),
        "data": [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(shown)],
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def make_vector(text: object, length: int = LIMITS.dimensions) -> list[float]:
    """Return numbers that a float32 holds exactly and that differ from input to input."""
    seed = zlib.crc32(json.dumps(text).encode())
    return [((seed >> index) % 64) / 64 for index in range(length)]


def _list_inputs(value: object) -> list[object]:
    if isinstance(value, list) and not (value and isinstance(value[0], int)):
        return value
    return [value]


def rank(body: Mapping[str, Any]) -> Json:
    """Return the documents by how many words they share with the query, best first."""
    query = set(str(body.get("query", "")).lower().split())
    documents = [document if isinstance(document, str) else document.get("text", "") for document in body.get("documents", [])]
    scores = [len(query & set(text.lower().split())) / (len(query) or 1) for text in documents]
    order = sorted(range(len(documents)), key=lambda index: -scores[index])[: body.get("top_n") or len(documents)]
    results = [{"index": index, "relevance_score": scores[index], "document": {"text": documents[index]}} for index in order]
    return {"id": "rerank-scripted", "model": body.get("model", "scripted"), "results": results, "usage": {"total_tokens": 9}}


def transcribe(fields: Mapping[str, str]) -> tuple[str, bytes]:
    """Return content type and body of a transcript in the format that was asked for."""
    kind = fields.get("response_format", "json")
    if kind == "text":
        return "text/plain; charset=utf-8", f"{TRANSCRIPT}\n".encode()
    if kind == "srt":
        return "text/plain; charset=utf-8", f"1\n00:00:00,000 --> 00:00:01,500\n{TRANSCRIPT}\n\n".encode()
    if kind == "vtt":
        return "text/plain; charset=utf-8", f"WEBVTT\n\n00:00:00.000 --> 00:00:01.500\n{TRANSCRIPT}\n\n".encode()
    said: Json = {"text": TRANSCRIPT, "usage": {"type": "duration", "seconds": 2}}
    if kind == "verbose_json":
        segment = {"id": 0, "seek": 0, "start": 0.0, "end": 1.5, "text": TRANSCRIPT, "tokens": [1], "temperature": 0.0}
        said |= {"task": "transcribe", "language": fields.get("language", "english"), "duration": 1.5, "segments": [segment]}
    return "application/json", json.dumps(said).encode()


def draw(body: Mapping[str, Any]) -> Json:
    """Return as many images as were asked for."""
    return {"created": CREATED, "data": [{"b64_json": PIXEL} for _ in range(int(body.get("n") or 1))]}
