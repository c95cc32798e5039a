"""What can go wrong on the node, one tree. Messages are for a person and never carry secrets, prompts or tokens.

``RequestRefused`` and what follows it reach a client: each class carries its code and HTTP status (the names are those of
the model-runner and llm-pool specifications where they have one); ``runner.api`` and ``runner.relay`` only render them.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import ClassVar

import msgspec

from wire import clock
from wire.events import EndReader, fail_response
from wire.ticket import TicketFault

ADMIN_PREFIX = "/v1/admin/"
"""Below it errors have the shape of llm-pool's admin API."""
_MESSAGES, _RESPONSES = "/v1/messages", "/v1/responses"
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class RunnerError(Exception):
    """Base of everything this program raises on purpose."""


class ConfigError(RunnerError):
    """An option cannot be used; the text names it and says what would do."""


class EngineError(RunnerError):
    """The engine did not start or does not serve; the text ends with its own last words where it left any."""


class EngineSilent(EngineError):
    """The engine took the connection and did not answer in time."""


class ReplicaUnloaded(EngineError):
    """A replica over several nodes is over because it was unloaded on another of them."""


class SessionLost(RunnerError):
    """The socket to a gateway is gone, or may not be used any more."""


class AuthRefused(SessionLost):
    """The gateway does not accept this node's credential."""


class NameInUse(AuthRefused):
    """Another node is at work under this name and credential."""


class StreamClosed(RunnerError):
    """The stream has already ended, so nothing more may be sent on it."""


class RequestRefused(RunnerError):
    """A request that is not carried out. ``details`` are further members of the error object, camelCase as on the wire."""

    code: ClassVar[str] = "invalid_request"
    status: ClassVar[int] = 400
    retryable: ClassVar[bool] = False

    def __init_subclass__(cls, code: str = "", status: int = 0, *, retryable: bool = False) -> None:
        """Take a class's own code, status and whether it may be tried again; what is not given is that of its base."""
        cls.code, cls.status, cls.retryable = code or cls.code, status or cls.status, retryable or cls.retryable

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        details: dict[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.details: dict[str, object] = details or {}


class InvalidRequest(RequestRefused):
    """Malformed body, wrong type, value out of range; ``param`` names the field."""


class InvalidLoadRequest(RequestRefused, code="invalid_load_request"):
    """A load override that this backend does not know or that is out of its limits; ``param`` names the field."""


class ModalityUnsupported(RequestRefused, code="modality_unsupported"):
    """The model does not serve this endpoint."""


class RemoteNotAllowed(RequestRefused, code="remote_not_allowed", status=403):
    """The model is a remote one and the request does not say ``allow_remote``."""


class OpTokenRefused(RequestRefused, code="op_token_refused", status=403):
    """The operation token does not hold; one text for every reason, the reason itself is in the node's log."""


class OperationsDisabled(RequestRefused, code="operations_disabled", status=403):
    """No key is configured, so no lifecycle operation is carried out."""


class AccessRefused(RequestRefused, code="unauthorized", status=401):
    """The API key of this node is missing or wrong."""


class UnknownModel(RequestRefused, code="unknown_model", status=404):
    """Nobody here has heard of the model."""


class UnknownTask(RequestRefused, code="unknown_task", status=404):
    """There is no such load task."""


class WrongState(RequestRefused, code="model_not_loaded", status=409):
    """The model is in a state in which this cannot be done."""


class ModelNotLoaded(WrongState):
    """It is known but not loaded."""


class ModelLoading(WrongState, code="model_loading", retryable=True):
    """It is being loaded."""


class ModelUnloading(WrongState, code="model_unloading"):
    """It is being unloaded; also what a waiting request hears when that begins."""


class AttachedModel(WrongState, code="invalid_request"):
    """It belongs to the server given with ``--backend``, which alone loads and unloads its models."""

    def __init__(self, model_id: str) -> None:
        super().__init__(f"{model_id} is a model of the server given with --backend; load and unload it there.")


class ModelFailed(WrongState, code="model_failed"):
    """Its last load failed, or its engine is down."""


class OperationInterrupted(WrongState, code="operation_interrupted"):
    """The operation of this token was begun and cut off; it is not begun again."""


class OperationLimit(RequestRefused, code="operation_limit", status=429, retryable=True):
    """As many operations began as this node carries out in that time; the approval is not used up."""


class InsufficientMemory(WrongState, code="insufficient_memory"):
    """It cannot fit; ``details`` has ``requiredMB``, ``freeMB`` and ``suggestions``."""


class LoadConflict(WrongState, code="load_conflict"):
    """It is loaded otherwise than asked for; ``details`` has ``conflicts`` with ``name``, ``inForce`` and ``asked`` of each."""


class SettingsConflict(WrongState, code="settings_reload_conflict"):
    """New settings would change a model that is loaded; ``details`` has ``conflicts``."""


class InvalidSettings(RequestRefused, code="invalid_settings"):
    """The settings files cannot be used."""


class TenantQueueFull(RequestRefused, code="fairness_key_queue_full", status=429, retryable=True):
    """The tenant has as many requests waiting for the model as it may."""


class ModelQueueFull(RequestRefused, code="executor_queue_full", status=429, retryable=True):
    """As many requests wait for the model as may."""


class RateLimitExceeded(RequestRefused, code="rate_limit_exceeded", status=429, retryable=True):
    """``details`` has ``limit``, ``remaining`` and ``resetAt`` (Unix seconds)."""


class SpendingCapReached(RequestRefused, code="spending_cap_reached", status=429):
    """The tenant's monthly cap for remote models does not cover the request."""


class QueueFull(RequestRefused, code="queue_full", status=503, retryable=True):
    """The node is saturated; ``details`` has ``queueDepth`` and ``avgWaitMs``."""


class QueueTimeout(RequestRefused, code="queue_timeout", status=503, retryable=True):
    """The request waited for longer than QUEUE_TIMEOUT_MS."""


class Unavailable(RequestRefused, code="unavailable", status=503, retryable=True):
    """The node is starting or stopping."""


class EngineUnavailable(RequestRefused, code="engine_failed", status=502, retryable=True):
    """The engine does not answer, or broke off."""


class RemoteRefused(RequestRefused, code="remote_refused", status=502):
    """The provider of a remote model turns this node away, before it has done anything; only its owner can help."""


class EngineNotReached(EngineUnavailable):
    """No engine has seen the request: there was none, or no connection to it."""


class DownloadFailed(RunnerError):
    """Model files could not be fetched; the text says why and what would help."""


class CorruptModel(RunnerError):
    """A model file is damaged, cut short or not what its name says; the text names the file and what is wrong with it."""

    @classmethod
    def of(cls, path: Path, problem: str) -> CorruptModel:
        return cls(f"{path.name} is damaged: {problem}. Copy or download it again.")


class NotFound(RequestRefused, code="not_found", status=404):
    """There is no such path."""


class MethodNotAllowed(RequestRefused, code="method_not_allowed", status=405):
    """The path is there, the method is not."""


class TooLarge(RequestRefused, code="request_too_large", status=413):
    """The body has more bytes than this endpoint reads."""


class WrongMediaType(RequestRefused, code="unsupported_media_type", status=415):
    """The body is not of the type that this endpoint reads."""


class SlowBody(RequestRefused, code="request_timeout", status=408, retryable=True):
    """The body did not arrive in time."""


class OperationFailed(RequestRefused, code="engine_failed", status=500):
    """An engine did not do what it was told; the text has its own words."""


class ModelLoadFailed(RequestRefused, code="model_load_failed", status=500):
    """The files of a model could not be fetched or used, or its load ended in another state than loaded."""


class Broken(RequestRefused, code="internal_error", status=500):
    """A bug of ours; the log has the details."""


class ForeignPage(RequestRefused, code="forbidden", status=403):
    """A request that a web page of another origin, or of a rebound name, had a browser send."""


class TicketRefused(RequestRefused, code="ticket_malformed", status=401):
    """A ticket does not open this; the client asks the gateway for another one. Each has one sentence of its own."""

    words: ClassVar[str] = "The ticket cannot be read."

    def __init__(self) -> None:
        super().__init__(self.words)


class _UnknownKey(TicketRefused, code=TicketFault.UNKNOWN_KEY):
    words = "The ticket was signed with a key that this node does not know."


class _BadSignature(TicketRefused, code=TicketFault.BAD_SIGNATURE):
    words = "The signature of the ticket does not hold."


class _WrongAudience(TicketRefused, code=TicketFault.WRONG_AUDIENCE):
    words = "The ticket is for another node: use it at its own base_url."


class _NotYet(TicketRefused, code=TicketFault.NOT_YET):
    words = "The ticket is not valid yet: the clock of this node, or of its gateway, is wrong."


class _Expired(TicketRefused, code=TicketFault.EXPIRED):
    words = "The ticket has expired: a request begins within seconds. Ask the gateway for another one."


class _WrongModel(TicketRefused, code=TicketFault.WRONG_MODEL, status=403):
    words = "The ticket is for another model than the request names."


class _TooMuch(TicketRefused, code=TicketFault.TOO_MUCH, status=403):
    words = "The request asks for more tokens than its ticket permits."


class _Spent(TicketRefused, code=TicketFault.SPENT):
    words = "The ticket was used before: each is for one request. Ask the gateway for another one."


class TicketNotForPath(TicketRefused, code="ticket_path_wrong", status=403):
    """Tickets are for inference alone."""

    words = "A ticket opens the endpoints of chat, completions, responses, messages and embeddings, by POST, and nothing else."


TICKET_REFUSALS: dict[TicketFault, type[TicketRefused]] = {
    TicketFault.MALFORMED: TicketRefused,
    TicketFault.UNKNOWN_KEY: _UnknownKey,
    TicketFault.BAD_SIGNATURE: _BadSignature,
    TicketFault.WRONG_AUDIENCE: _WrongAudience,
    TicketFault.NOT_YET: _NotYet,
    TicketFault.EXPIRED: _Expired,
    TicketFault.WRONG_MODEL: _WrongModel,
    TicketFault.TOO_MUCH: _TooMuch,
    TicketFault.SPENT: _Spent,
}


def make_response_id() -> str:
    """Return a new id of an answer."""
    return f"resp_{secrets.token_hex(12)}"


def refusal_body(refusal: RequestRefused, *, endpoint: str = "", model: str | None = None) -> bytes:
    """Return the JSON body of a refusal: ``{"error": {code, message, type, param, retryable, …}}``, its details among them.

    ``endpoint``: the path that was asked. On /v1/messages Anthropic's ``"type": "error"`` stands outside; below ADMIN_PREFIX
    it is llm-pool's ``{"detail": {code, model, message, …}}``.
    """
    if endpoint.startswith(ADMIN_PREFIX):
        detail = {"code": refusal.code, "model": model, "message": refusal.message, **refusal.details}
        return msgspec.json.encode({"detail": detail if refusal.param is None else {**detail, "param": refusal.param}})
    outside = {"type": "error"} if endpoint == _MESSAGES else {}
    return msgspec.json.encode({**outside, "error": refusal_fields(refusal)})


def refusal_fields(refusal: RequestRefused) -> dict[str, object]:
    """Return the members of the error object."""
    return {
        "code": refusal.code,
        "message": refusal.message,
        "type": _TYPES.get(refusal.status, "api_error"),
        "param": refusal.param,
        "retryable": refusal.retryable,
        **refusal.details,
    }


def error_event(endpoint: str, refusal: RequestRefused, *, model: str = "", ends: EndReader | None = None) -> bytes:
    """Return what ends an answer that broke off, as the API that the client speaks has it.

    ``ends``: what passed of an engine's own stream. Its Responses end with ``response.failed``, llm-pool's with an error event.
    """
    fields = refusal_fields(refusal)
    if endpoint == _MESSAGES:
        return write_event("error", {"error": {"type": fields["type"], "message": fields["message"]}})
    if endpoint == _RESPONSES and ends is not None:
        error = msgspec.json.encode({"code": "server_error", "message": refusal.message})
        first = _begin_response(model)
        return fail_response(error, first=ends.first, last=ends.recent) or first + fail_response(error, first=first, last=b"")
    if endpoint == _RESPONSES:
        return write_event("error", {name: fields[name] for name in ("code", "message", "param")})
    return b"data: " + msgspec.json.encode({"error": fields}) + b"\n\n"


def _begin_response(model: str) -> bytes:
    """Return the event that begins a response of which the engine said nothing: only what has begun can fail."""
    response = {
        "id": make_response_id(), "object": "response", "created_at": int(clock.unix_s()), "status": "in_progress",
        "error": None, "incomplete_details": None, "model": model, "output": [], "usage": None,
    }  # fmt: skip
    return write_event("response.created", {"sequence_number": 0, "response": response})


def write_event(name: str, fields: dict[str, object]) -> bytes:
    """Return a server-sent event whose data say its name too, as Anthropic, OpenAI's Responses and llm-pool have it."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))
