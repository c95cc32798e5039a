"""Every endpoint in order, printed as curl would show it, and the fields of the specification's own examples."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from benchmarks.boxcheck.box import Box
from benchmarks.boxcheck.client import Reply, question, speech_form
from benchmarks.boxcheck.models import EMBEDDER, FIRST, SECOND, TINY
from benchmarks.boxcheck.parsing import missing_fields, read_comments, read_events, read_metrics, shorten
from benchmarks.boxcheck.workbench import Workbench
from wire.optoken.verifier import Operation

SHOWN_CHARS = 600
CAPABILITIES_EXAMPLE = {
    "runnerType": "", "runnerId": "",
    "models": {
        "loaded": [{"id": "", "quantization": "", "contextLength": 0, "loadedAt": 0, "gpuMemoryMB": 0}],
        "loading": [{"id": "", "progress": 0.0, "eta": 0}],
        "available": [""],
    },
    "resources": {
        "gpuIds": [0], "gpuMemoryTotalMB": 0, "gpuMemoryUsedMB": 0, "gpuMemoryFreeMB": 0, "gpuUtilization": 0.0,
        "kvCacheSizeMB": 0, "kvCacheUtilization": 0.0,
    },
    "queue": {"depth": 0, "maxDepth": 0, "avgWaitMs": 0, "p95WaitMs": 0},
    "capabilities": {
        "streaming": True, "prefixCaching": True, "multiTenant": True, "visionInput": False, "audioInput": False,
        "functionCalling": True,
    },
    "health": "",
}  # fmt: skip
"""The document of ``GET /v1/capabilities`` in the model-runner specification; values are of no matter here."""
HEALTH_EXAMPLE = {"status": "", "uptime": 0, "modelsLoaded": 0, "queueDepth": 0}
LOAD_EXAMPLE = {"taskId": "", "status": "", "progress": 0.0, "eta": 0}
TASK_EXAMPLE = {"taskId": "", "status": "", "modelId": "", "gpuMemoryUsedMB": 0, "loadTimeMs": 0}
UNLOAD_EXAMPLE = {"modelId": "", "gpuMemoryFreedMB": 0, "kvCacheFlushed": True}
FLUSH_EXAMPLE = {"flushed": True, "entriesRemoved": 0, "memoryFreedMB": 0}
POOL_EXAMPLE = {
    "id": "", "object": "", "model": "", "output": [{"type": "", "text": ""}], "output_text": "",
    "metrics": {
        "backend_inference_wall_ms": 0, "engine_total_wall_ms": 0, "engine_outside_backend_wall_ms": 0,
        "pool_total_wall_ms": 0, "engine_tokenize_ms": 0, "gpu_time_to_first_token_ms": 0, "gpu_generate_total_ms": 0,
        "gpu_decode_after_first_token_ms": 0, "engine_prompt_tokens": 0, "engine_output_tokens": 0,
        "engine_tokens_per_second": 0,
    },
}  # fmt: skip
SPEC_METRICS = (
    "vllm_requests_total", "vllm_cache_hit_rate", "vllm_queue_depth", "vllm_inference_duration_seconds_bucket",
    "vllm_inference_duration_seconds_sum", "vllm_inference_duration_seconds_count",
)  # fmt: skip
"""``vllm_gpu_memory_used`` is there where a GPU is."""
CACHE_HEADERS = ("x-cache-hit", "x-cache-tokens-reused", "x-queue-wait-ms", "x-gpu-time-ms")
SETTINGS = {
    "engine": {"models": {EMBEDDER: {"backend": "gguf", "model_path": str(TINY), "gguf_embedding": True, "gguf_n_ctx": 256}}}
}


class Walk:
    """Makes calls and prints them; each must have the status that is expected."""

    def __init__(self, bench: Workbench, box: Box) -> None:
        self._section = bench.section
        self._client = box.client
        self._surprises: list[str] = []
        self.calls = 0

    async def go(
        self,
        method: str,
        path: str,
        wanted: int,
        *,
        body: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Call, print, compare the status."""
        reply = await self._client.call(method, path, body=body, headers=headers)
        self.note(f"{method} {path}", reply, wanted, body=body, headers=headers)
        return reply

    def note(
        self, title: str, reply: Reply, wanted: int, *, body: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Print a call that was made, and compare its status."""
        self.calls += 1
        sent = "" if body is None else f" {shorten(json.dumps(_without_token(body), ensure_ascii=False), 240)}"
        named = "".join(f" -H '{name}: {value}'" for name, value in (headers or {}).items())
        self._section.line(f"\n> {title}{named}{sent}")
        told = [f"{name}: {reply.headers[name]}" for name in (*CACHE_HEADERS, "retry-after") if name in reply.headers]
        self._section.line(f"< {reply.status}{' · ' if told else ''}{', '.join(told)}")
        self._section.line(f"< {shorten(reply.body.decode(errors='replace'), SHOWN_CHARS)}")
        if reply.status != wanted:
            self._surprises.append(f"{title}: {reply.status} instead of {wanted}")

    def compare(self, title: str, example: Mapping[str, object], reply: Reply) -> None:
        """Judge whether every field of the specification's example is there."""
        missing = missing_fields(example, reply.document)
        self._section.judge(f"{title} has every field of the specification", passed=not missing, shown=", ".join(missing))

    def judge_statuses(self) -> None:
        """Judge whether every status was the expected one."""
        self._section.judge(
            f"all {self.calls} calls had the status they should have",
            passed=not self._surprises,
            shown="; ".join(self._surprises),
        )


async def run(bench: Workbench) -> None:
    """Walk through everything."""
    async with bench.open(settings=SETTINGS) as box:
        walk = Walk(bench, box)
        await _look_around(walk)
        await _refusals(walk, box)
        await _load(walk, box)
        await _infer(bench, walk, box)
        await _pool(walk, box)
        await _flush_and_unload(bench, walk, box)
        walk.judge_statuses()
        bench.section.keep(calls=walk.calls)


async def _look_around(walk: Walk) -> None:
    await walk.go("GET", "/", 200)
    await walk.go("GET", "/openapi.json", 200)
    walk.compare("GET /health", HEALTH_EXAMPLE, await walk.go("GET", "/health", 200))
    await walk.go("GET", "/v1/capabilities", 200)
    await walk.go("GET", "/v1/models", 200)


async def _refusals(walk: Walk, box: Box) -> None:
    """What is refused, before anything is loaded."""
    client, load = box.client, "/v1/models/load"
    await walk.go("POST", load, 403, body={"modelId": FIRST})
    for_other = client.sign(Operation.MODEL_LOAD, SECOND)
    await walk.go("POST", load, 403, body={"modelId": FIRST, "verifiedOpToken": for_other})
    token = client.sign(Operation.MODEL_LOAD, FIRST)
    await walk.go("POST", load, 400, body={"modelId": FIRST, "overrides": {"gguf_n_ctx": 0}, "verifiedOpToken": token})
    awq = {"modelId": FIRST, "quantization": "awq-4bit", "verifiedOpToken": client.sign(Operation.MODEL_LOAD, FIRST)}
    await walk.go("POST", load, 400, body=awq)
    unknown = client.sign(Operation.MODEL_LOAD, "nobody-knows")
    await walk.go("POST", load, 404, body={"modelId": "nobody-knows", "verifiedOpToken": unknown})
    await walk.go("GET", f"{load}/load-unknown", 404)
    await walk.go("POST", "/v1/chat/completions", 409, body=question(FIRST, 4))
    await walk.go("POST", "/v1/chat/completions", 404, body=question("nobody-knows", 4))


async def _load(walk: Walk, box: Box) -> None:
    """Load, watch, load the same again, and a second model by evicting the first."""
    client = box.client
    first = await client.load(FIRST, maxContextLength=1024, gpuMemoryBudgetMB=4000)
    walk.note("POST /v1/models/load (token left out here)", first, 202, body={"modelId": FIRST, "maxContextLength": 1024})
    walk.compare("POST /v1/models/load", LOAD_EXAMPLE, first)
    task_id = str(first.document["taskId"])
    await walk.go("GET", f"/v1/models/load/{task_id}", 200)
    await client.wait_task(task_id)
    walk.compare("GET /v1/models/load/{taskId}", TASK_EXAMPLE, await walk.go("GET", f"/v1/models/load/{task_id}", 200))
    again = await client.load(FIRST)
    walk.note("POST /v1/models/load, the same again", again, 200, body={"modelId": FIRST})
    second = await client.load(SECOND)
    walk.note("POST /v1/models/load, another", second, 202, body={"modelId": SECOND})
    document = await walk.go("GET", "/v1/capabilities", 200)
    walk.compare("GET /v1/capabilities, one model loaded and one loading", CAPABILITIES_EXAMPLE, document)
    await client.wait_task(str(second.document["taskId"]))
    await client.unload(FIRST)
    evicting = await client.load(FIRST, evictModel=SECOND)
    walk.note("POST /v1/models/load with evictModel", evicting, 202, body={"modelId": FIRST, "evictModel": SECOND})
    await client.wait_task(str(evicting.document["taskId"]))
    await walk.go("GET", f"/v1/models/load/{evicting.document['taskId']}", 200)
    await walk.go("GET", "/v1/models", 200)


async def _infer(bench: Workbench, walk: Walk, box: Box) -> None:
    section, client = bench.section, box.client
    headers = {"X-Tenant-ID": "community-x", "X-Cache-Mode": "prefix", "X-Cache-Tag": "session-abc123", "X-Priority": "high"}
    await walk.go("POST", "/v1/chat/completions", 200, body=question(FIRST, 12), headers=headers)
    again = await walk.go("POST", "/v1/chat/completions", 200, body=question(FIRST, 12), headers=headers)
    section.judge(
        "answers carry the four headers, and a repeated prompt hits the cache",
        passed=all(name in again.headers for name in CACHE_HEADERS) and again.headers.get("x-cache-hit") == "true",
    )
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = await walk.go("POST", "/v1/chat/completions", 200, body=question(FIRST, 6) | usage, headers=headers)
    chunk = next((event for event in read_events(streamed.body) if "muster" in event), {})
    section.judge(
        "a stream ends with its numbers, in a comment and in the usage chunk",
        passed=set(CACHE_HEADERS) <= set(read_comments(streamed.body)) and bool(chunk), shown=chunk.get("muster", ""),
    )  # fmt: skip
    await walk.go("POST", "/v1/completions", 200, body={"model": FIRST, "prompt": "The lamp is", "max_tokens": 6})
    await walk.go("POST", "/v1/images/generations", 400, body={"model": FIRST, "prompt": "a lighthouse"})
    await client.load_whole(EMBEDDER)
    await walk.go("POST", "/v1/embeddings", 200, body={"model": EMBEDDER, "input": "a lighthouse at night"})
    if bench.models.whisper is not None:
        await client.load_whole(bench.models.whisper)
        heard = await client.call(
            "POST", "/v1/audio/transcriptions", form=speech_form(bench.models.whisper, bench.models.audio)
        )
        walk.note("POST /v1/audio/transcriptions (multipart)", heard, 200)
        await client.unload(bench.models.whisper)


async def _pool(walk: Walk, box: Box) -> None:
    """The surface of llm-pool."""
    body: dict[str, object] = {
        "model": FIRST, "input": "The weather is pleasant today.", "instructions": "Translate to Dutch.", "stream": False,
        "decoding": {
            "beam_size": 1, "top_k": 1, "top_p": 1.0, "temperature": 0.1, "repetition_penalty": 1.0, "max_tokens": 12,
        },
    }  # fmt: skip
    walk.compare("POST /v1/responses (llm-pool)", POOL_EXAMPLE, await walk.go("POST", "/v1/responses", 200, body=body))
    await walk.go("POST", "/v1/responses", 200, body=body | {"stream": True})
    await walk.go("POST", "/v1/responses", 200, body={"model": FIRST, "input": "Hello", "max_output_tokens": 6})
    await walk.go("GET", "/v1/admin/models", 200)
    await walk.go("GET", "/v1/admin/gpu-memory", 200)
    client = box.client
    token: dict[str, Any] = {"verifiedOpToken": client.sign(Operation.MODEL_UNLOAD, EMBEDDER)}
    await walk.go("POST", f"/v1/admin/models/{EMBEDDER}/unload", 200, body=token)
    token = {"verifiedOpToken": client.sign(Operation.MODEL_LOAD, EMBEDDER)}
    await walk.go("POST", f"/v1/admin/models/{EMBEDDER}/load", 200, body={"gguf_n_ctx": 128, **token})
    await walk.go("POST", f"/v1/admin/models/{EMBEDDER}/load", 403, body={})
    await walk.go("POST", "/v1/admin/models/nobody/load", 404, body={})
    await walk.go("POST", "/v1/admin/settings/reload", 200)


async def _flush_and_unload(bench: Workbench, walk: Walk, box: Box) -> None:
    client = box.client
    for scope, fields in (
        ("tenant", {"tenantId": "community-x"}), ("tag", {"tag": "session-abc123"}), ("model", {"modelId": FIRST}), ("all", {}),
    ):  # fmt: skip
        reply = await client.flush(scope, **fields)
        walk.note(f"POST /v1/cache/flush, {scope}", reply, 200, body={"scope": scope, **fields})
        if scope == "model":
            walk.compare("POST /v1/cache/flush", FLUSH_EXAMPLE, reply)
    gone = await client.unload(FIRST)
    walk.note("POST /v1/models/unload", gone, 200, body={"modelId": FIRST})
    walk.compare("POST /v1/models/unload", UNLOAD_EXAMPLE, gone)
    walk.note("POST /v1/models/unload, again", await client.unload(FIRST), 200, body={"modelId": FIRST})
    walk.note("POST /v1/models/unload, with force", await client.unload(EMBEDDER, force=True), 200, body={"force": True})
    metrics = await walk.go("GET", "/metrics", 200)
    names = {sample.name for sample in read_metrics(metrics.body.decode())}
    missing = [name for name in SPEC_METRICS if name not in names]
    bench.section.judge("the metrics have the names of the specification", passed=not missing, shown=", ".join(missing))
    await walk.go("GET", "/health", 200)


def _without_token(body: Mapping[str, object]) -> dict[str, object]:
    return {name: "…" if name == "verifiedOpToken" else value for name, value in body.items()}
