"""Load, ask, flush, unload on each engine: times, memory, and whose cached tokens an answer reuses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.boxcheck.box import GONE_S, Box, wait_for
from benchmarks.boxcheck.client import PROMPT, Reply, speech_form, tenant
from benchmarks.boxcheck.models import FIRST
from benchmarks.boxcheck.workbench import Workbench

MIB = 1024 * 1024
SLOTS = 4
"""As many as there are owners of cache entries here, so that none loses its entries to another."""
LONG_PROMPT = " ".join([PROMPT] * 4)
"""Several blocks of vLLM's cache, which keeps whole blocks of 128 tokens on a CPU."""
CACHED = "x-cache-tokens-reused"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One engine with the model and the overrides it is loaded with. ``speaks`` False: it hears instead."""

    engine: str
    model: str
    overrides: Mapping[str, object]
    speaks: bool = True


async def run(bench: Workbench) -> None:
    """Go through the engines, one node each."""
    for note in bench.models.notes:
        bench.section.line(f"  {note}")
    for candidate in candidates(bench):
        bench.progress.show(f"isolation: {candidate.engine}")
        async with bench.open(candidate.engine) as box:
            await _check(bench, box, candidate)


def candidates(bench: Workbench) -> list[Candidate]:
    """Return what can be checked here."""
    models = bench.models
    found = [Candidate("llama.cpp", FIRST, {"target_inflight": SLOTS, "gguf_n_ctx": 1024})]
    if models.ct2 is not None:
        found.append(Candidate("CTranslate2", models.ct2, {"target_inflight": SLOTS}))
    if models.whisper is not None:
        found.append(Candidate("faster-whisper", models.whisper, {}, speaks=False))
    if models.vllm is not None:
        overrides = {"target_inflight": SLOTS, "vllm_max_model_len": 1024, "vllm_kv_cache_memory_bytes": 256 * MIB}
        found.append(Candidate("vLLM", models.vllm, overrides))
    return found


async def _check(bench: Workbench, box: Box, candidate: Candidate) -> None:
    section, client = bench.section, box.client
    section.line(f"\n  {candidate.engine} ({candidate.model})")
    before = box.engine_bytes()
    task = await client.load_whole(candidate.model, overrides=candidate.overrides)
    loaded = box.engine_bytes()
    section.line(
        f"  load {task['loadTimeMs'] / 1000:.2f} s · memory {before // MIB} → {loaded // MIB} MiB, the node says "
        f"{task['gpuMemoryUsedMB']}, predicted {task['predictedMemoryMB']}"
    )
    if candidate.speaks:
        cached = await _ask_tenants(bench, box, candidate)
    else:
        cached = await _transcribe(bench, box, candidate)
    reply = await client.unload(candidate.model)
    gone = await wait_for(lambda: not box.engines(), limit_s=GONE_S)
    unloaded = reply.document
    section.line(
        f"  unload {reply.ended - reply.began:.2f} s · memory {unloaded['memoryBeforeMB']} → {unloaded['memoryAfterMB']} MiB, "
        f"freed {unloaded['gpuMemoryFreedMB']}"
    )
    section.judge(
        f"{candidate.engine}: after the unload no process and no memory is left",
        passed=reply.status == 200 and gone is not None and unloaded["memoryAfterMB"] == 0 and box.engine_bytes() == 0,
    )
    section.figures[candidate.engine] = {
        "load_s": task["loadTimeMs"] / 1000,
        "unload_s": reply.ended - reply.began,
        "measured_mb": task["gpuMemoryUsedMB"],
        "predicted_mb": task["predictedMemoryMB"],
        "loaded_bytes": loaded,
        "cached_tokens": cached,
    }


async def ask_once(bench: Workbench, box: Box, candidate: Candidate, *, name: str = "one") -> Reply:
    """Have a model answer one request: a chat, or speech to write down."""
    if candidate.speaks:
        return await box.client.chat(candidate.model, headers=tenant(name))
    form = speech_form(candidate.model, bench.models.audio)
    return await box.client.call("POST", "/v1/audio/transcriptions", form=form, headers=tenant(name))


async def _transcribe(bench: Workbench, box: Box, candidate: Candidate) -> dict[str, object]:
    """Have speech written down twice, by two tenants: there is nothing that could be shared."""
    section = bench.section
    replies = [await ask_once(bench, box, candidate, name=name) for name in ("one", "two")]
    section.line(f"  transcription {replies[0].ended - replies[0].began:.2f} s: {replies[0].body[:120].decode()}")
    section.judge(
        f"{candidate.engine}: speech is written down and nothing is reused",
        passed=all(reply.status == 200 and reply.headers.get(CACHED) == "0" for reply in replies),
    )
    outcome = await _flush(box, candidate, "all")
    section.judge(f"{candidate.engine}: a flush says that it has no cache", passed=outcome == "nothing-kept", shown=outcome)
    return {"flush": outcome}


async def _ask_tenants(bench: Workbench, box: Box, candidate: Candidate) -> dict[str, object]:
    """Ask the same as two tenants and under a tag, then flush by each scope and ask again."""

    async def ask(name: str, **headers: str) -> int:
        reply = await box.client.chat(candidate.model, prompt=LONG_PROMPT, headers=tenant(name, **headers))
        if reply.status != 200:
            raise AssertionError(f"{reply.status}: {reply.body[:300]!r}")
        return int(reply.number(CACHED))

    rows: list[list[object]] = [["cached tokens reused by", "tokens"]]

    async def note(title: str, name: str, **headers: str) -> int:
        tokens = await ask(name, **headers)
        rows.append([title, tokens])
        return tokens

    cold = await note("tenant one, first time", "one")
    warm = await note("tenant one, again", "one")
    foreign = await note("tenant two, the same words", "two")
    tagged = await note("tenant one under a tag, first time", "one", cache_tag="s1")
    tagged_again = await note("tenant one under the tag, again", "one", cache_tag="s1")
    off = await note("tenant one, X-Cache-Mode: none", "one", cache_mode="none")
    section = bench.section
    is_caching = warm > 0
    after: dict[str, tuple[str, int, int]] = {}
    for scope in ("tenant", "tag", "model", "all"):
        fields = {"tenant": {"tenantId": "one"}, "tag": {"tag": "s1"}, "model": {"modelId": candidate.model}}.get(scope, {})
        headers = {"cache_tag": "s1"} if scope == "tag" else {}
        await ask("one", **headers)
        await ask("two")
        outcome = await _flush(box, candidate, scope, **fields)
        mine = await note(f"tenant one after a flush of {scope}: {outcome}", "one", **headers)
        other = await note("  tenant two after the same flush", "two")
        after[scope] = (outcome, mine, other)
    section.table(rows)
    name = candidate.engine
    section.judge(f"{name}: another tenant reuses nothing", passed=foreign == 0 and cold == 0, shown=f"{foreign} tokens")
    section.judge(f"{name}: a tag is a cache of its own", passed=tagged == 0, shown=f"{tagged} tokens, then {tagged_again}")
    section.judge(f"{name}: X-Cache-Mode none reuses nothing", passed=off == 0, shown=f"{off} tokens")
    if not is_caching:
        section.judge(
            f"{name}: keeps no cache between requests, and a flush says so",
            passed=all(outcome == "nothing-kept" for outcome, _, _ in after.values()),
        )
    else:
        section.judge(f"{name}: the same tenant reuses its prompt", passed=warm > 0, shown=f"{warm} tokens")
        section.judge(
            f"{name}: after a flush nothing is reused",
            passed=all(mine == 0 or outcome not in {"flushed", "reloaded"} for outcome, mine, _ in after.values()),
            shown=", ".join(f"{scope} {outcome} {mine}" for scope, (outcome, mine, _) in after.items()),
        )
        section.judge(
            f"{name}: model and all are flushed or reloaded",
            passed=all(after[scope][0] in {"flushed", "reloaded"} for scope in ("model", "all")),
        )
    return {"same_tenant": warm, "other_tenant": foreign, "tag": tagged, "after_flush": {s: list(v) for s, v in after.items()}}


async def _flush(box: Box, candidate: Candidate, scope: str, **fields: object) -> str:
    reply = await box.client.flush(scope, **fields)
    outcomes = _outcomes(reply)
    for _ in range(5):
        if outcomes.get(candidate.model) != "refused-busy":
            break
        await asyncio.sleep(0.2)
        outcomes = _outcomes(await box.client.flush(scope, **fields))
    return outcomes.get(candidate.model, f"HTTP {reply.status}")


def _outcomes(reply: Reply) -> dict[str, str]:
    found: list[dict[str, Any]] = reply.document.get("models", [])
    return {str(entry["modelId"]): str(entry["outcome"]) for entry in found}
