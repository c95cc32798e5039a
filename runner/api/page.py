"""``GET /``: the state of the node and its endpoints, for a person. No scripts, nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import timedelta
from html import escape
from importlib.resources import files
from string import Template

from starlette.responses import Response

from runner.api.capabilities import CapabilityReport
from runner.api.schemas import CapabilitiesAnswer, Endpoint, LoadedModel, LoadingModel, Resources
from runner.limits import limits
from runner.parts import Parts, Phase
from wire import clock

_PAGE = Template(files("runner.api").joinpath("page.html").read_text(encoding="utf-8"))
_STYLE = _PAGE.template.partition("<style>")[2].partition("</style>")[0]
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


async def write_page(parts: Parts, report: CapabilityReport, table: Sequence[Endpoint]) -> Response:
    state = await report.build()
    if parts.phase is not Phase.SERVING:
        state.health = parts.phase.value
    refresh = limits().api.page_loading_refresh_s if state.models.loading else limits().api.page_refresh_s
    html = _PAGE.substitute(
        refresh=refresh, name=escape(state.runner_id), kind=escape(state.runner_type), health=escape(state.health),
        tone="good" if state.health == "healthy" else "bad", uptime=_duration(clock.unix_s() - parts.started_at),
        numbers=_numbers(state), models=_models(state), operations=_operations(state), endpoints=_endpoints(table),
    )  # fmt: skip
    return Response(html, headers=_HEADERS)


def _numbers(state: CapabilitiesAnswer) -> str:
    memory, queue = state.resources, state.queue
    used = memory.gpu_memory_used_mb / memory.gpu_memory_total_mb if memory.gpu_memory_total_mb else 0.0
    name = "Memory of the GPUs" if memory.device == "gpu" else "Memory of the machine"
    figure = f"{_size(memory.gpu_memory_used_mb)} of {_size(memory.gpu_memory_total_mb)}"
    cache = (
        f"{memory.kv_cache_utilization:.0%} of {_size(memory.kv_cache_size_mb)}"
        if memory.kv_cache_utilization is not None
        else _size(memory.kv_cache_size_mb)
    )
    tiles = [
        _tile(name, figure, _meter(used, name)),
        _tile("KV cache in use", cache, _meter(memory.kv_cache_utilization or 0.0, "KV cache in use")),
        _tile("Waiting", f"{queue.depth} of {queue.max_depth}", f"<p>{queue.avg_wait_ms} ms on average, 95 % within "
              f"{queue.p95_wait_ms} ms</p>"),
    ]  # fmt: skip
    return "".join([*tiles, *_gpu_tiles(memory)])


def _gpu_tiles(memory: Resources) -> list[str]:
    tiles = []
    for gpu in memory.gpus:
        name = f"GPU {gpu.index}: {gpu.name}"
        load = "load unknown" if gpu.utilization is None else f"{gpu.utilization:.0%} busy"
        share = gpu.memory_used_mb / gpu.memory_total_mb if gpu.memory_used_mb and gpu.memory_total_mb else 0.0
        tiles.append(_tile(name, load, _meter(share, f"Memory of GPU {gpu.index}")))
    return tiles


def _models(state: CapabilitiesAnswer) -> str:
    models = state.models
    rows = [_loaded_row(model, state.resources.device) for model in models.loaded]
    rows += [_loading_row(model) for model in models.loading]
    failed = {model.id for model in models.failed}
    rows += [_row(model.id, "failed", "bad", escape(model.reason)) for model in models.failed]
    rows += [_row(model.id, "unusable", "bad", escape(model.reason)) for model in models.unusable]
    idle = [name for name in models.available if name not in failed]
    rows += [_row(name, "available", "", "can be loaded") for name in idle[: limits().api.page_names]]
    if len(idle) > limits().api.page_names:
        rows.append(
            _row(f"and {len(idle) - limits().api.page_names} more", "available", "", "GET /v1/capabilities names them all")
        )
    return (
        "".join(rows) or '<tr><td colspan="3">No model is known here: set MODEL_BASE_PATH or write a settings file.</td></tr>'
    )


def _operations(state: CapabilitiesAnswer) -> str:
    held = state.operations
    policy = f"version {held.policy_version}, {held.policy_words}" if held.policy_version else "none pinned"
    witnessed = f"{held.witness_size} entries" if held.witness_size else "nothing yet"
    rows = {"Level": held.level, "Runner id": state.runner_id, "Policy": policy, "Audit log witnessed": witnessed}
    table = "".join(f'<tr><th scope="row">{name}</th><td>{escape(value)}</td></tr>' for name, value in rows.items())
    advice = f'<p><span class="state bad">to do</span> {escape(held.advice)}</p>' if held.advice else ""
    return f'{advice}<div class="scroll"><table><tbody>{table}</tbody></table></div>'


def _loaded_row(model: LoadedModel, device: str) -> str:
    memory = [] if model.gpu_memory_mb is None else [f"{_size(model.gpu_memory_mb)} {'GPU ' if device == 'gpu' else ''}memory"]
    parts = [
        model.engine,
        *([] if model.replicas == 1 else [f"{model.replicas} replicas"]),
        *memory,
        *([] if model.kv_mb is None else [f"{_size(model.kv_mb)} of it KV cache"]),
        *([] if model.context_length is None else [f"{model.context_length} tokens of context"]),
        *([] if model.quantization is None else [model.quantization]),
    ]
    return _row(model.id, "loaded", "good", escape(", ".join(parts)))


def _loading_row(model: LoadingModel) -> str:
    eta = "" if model.eta is None else f", {model.eta} s left"
    share = 0.0 if model.progress is None else model.progress
    done = "" if model.progress is None else f" {model.progress:.0%}"
    return _row(model.id, "loading", "busy", f"{escape(model.stage)}{done}{eta}{_meter(share, f'Loading {model.id}')}")


def _endpoints(table: Sequence[Endpoint]) -> str:
    groups: dict[str, list[Endpoint]] = {}
    for one in table:
        groups.setdefault(one.tag, []).append(one)
    return "".join(
        f"<h3>{escape(tag)}</h3><ul>{''.join(_endpoint(one) for one in group)}</ul>" for tag, group in groups.items()
    )


def _endpoint(one: Endpoint) -> str:
    path = escape(one.shown_path)
    shown = f'<a href="{path}">{path}</a>' if one.method == "GET" and "{" not in path else path
    return f"<li><code><b>{one.method}</b> {shown}</code> <span>{escape(one.summary)}</span></li>"


def _row(name: str, state: str, tone: str, detail: str) -> str:
    return f'<tr><th scope="row">{escape(name)}</th><td><span class="state {tone}">{state}</span></td><td>{detail}</td></tr>'


def _tile(name: str, figure: str, more: str) -> str:
    return f"<div><h3>{escape(name)}</h3><strong>{escape(figure)}</strong>{more}</div>"


def _meter(share: float, name: str) -> str:
    # Two values instead of a style attribute, which the content security policy refuses.
    return f'<progress aria-label="{escape(name)}" max="1000" value="{round(min(1.0, max(0.0, share)) * 1000)}"></progress>'


def _size(size_mb: int) -> str:
    return f"{size_mb / 1024:.1f} GiB" if size_mb >= 1024 else f"{size_mb} MiB"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
