"""How lifecycle operations went, in the words of the model-runner specification. Pure."""

from __future__ import annotations

from runner.definitions.settings import SettingsChange
from runner.engines.port import FlushOutcome
from runner.errors import RequestRefused, RunnerError, refusal_fields
from runner.limits import MIB
from runner.pool import LoadResult


def load_result(result: LoadResult) -> dict[str, object]:
    """Return what a completed load came to."""
    return {
        "gpuMemoryUsedMB": None if result.memory_bytes is None else result.memory_bytes // MIB,
        "predictedMemoryMB": None if result.predicted_bytes is None else result.predicted_bytes // MIB,
        "loadTimeMs": round(result.load_s * 1000), "replicas": result.replicas, "evicted": result.evicted,
    }  # fmt: skip


def failure_fields(error: RunnerError) -> dict[str, object]:
    """Return the code of what went wrong, with its details."""
    if isinstance(error, RequestRefused):
        return {"code": error.code, **error.details}
    return {"code": "model_load_failed"}


def refusal_outcome(error: RunnerError) -> tuple[int, dict[str, object]]:
    """Return an operation that failed as it is recorded: an HTTP status and the body of its answer."""
    if isinstance(error, RequestRefused):
        return error.status, {"error": refusal_fields(error)}
    fields = {**failure_fields(error), "message": str(error), "type": "api_error", "param": None, "retryable": False}
    return 500, {"error": fields}


def flush_fields(model_id: str, outcome: FlushOutcome) -> dict[str, object]:
    """Return what a flush came to for one model."""
    return {
        "modelId": model_id, "outcome": outcome.result.value, "detail": outcome.detail,
        "entriesRemoved": outcome.entries_removed, "memoryFreedMB": outcome.memory_freed_mb,
    }  # fmt: skip


def reload_fields(change: SettingsChange) -> dict[str, object]:
    """Return what a reload of the settings came to, in llm-pool's words."""
    return {
        "added_models": list(change.added), "removed_models": list(change.removed), "updated_models": list(change.updated),
        "unchanged_models": list(change.unchanged), "service_restart_required": change.service_restart_required,
    }  # fmt: skip
