"""The life of a model on the node as a table. Pure."""

from __future__ import annotations

from enum import StrEnum

from runner.errors import RunnerError


class ModelState(StrEnum):
    """The five states of the llm-pool specification."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


class ModelEvent(StrEnum):
    """What happens to a model."""

    LOAD = "load"
    """Somebody wants it; replicas are being started."""
    SERVE = "serve"
    """Every replica answers."""
    FAIL = "fail"
    """A load did not come about, or an unload could not be carried out."""
    LOSE = "lose"
    """No replica serves any more; their supervisors go on trying."""
    RECOVER = "recover"
    """At least one replica serves again."""
    UNLOAD = "unload"
    """It is to go."""
    VANISH = "vanish"
    """Every replica is known to be gone."""


class IllegalTransition(RunnerError):
    """The event cannot happen in this state."""


_S, _E = ModelState, ModelEvent
TRANSITIONS: dict[tuple[ModelState, ModelEvent], ModelState] = {
    (_S.UNLOADED, _E.LOAD): _S.LOADING,
    (_S.FAILED, _E.LOAD): _S.LOADING,
    (_S.LOADING, _E.SERVE): _S.LOADED,
    (_S.LOADING, _E.FAIL): _S.FAILED,
    (_S.LOADING, _E.UNLOAD): _S.UNLOADING,
    (_S.LOADED, _E.LOSE): _S.FAILED,
    (_S.LOADED, _E.UNLOAD): _S.UNLOADING,
    (_S.FAILED, _E.RECOVER): _S.LOADED,
    (_S.FAILED, _E.UNLOAD): _S.UNLOADING,
    (_S.UNLOADING, _E.VANISH): _S.UNLOADED,
    (_S.UNLOADING, _E.FAIL): _S.FAILED,
}


def next_state(state: ModelState, event: ModelEvent) -> ModelState:
    """Return the state after ``event``. Raises IllegalTransition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a model that is {state} cannot {event}") from None
