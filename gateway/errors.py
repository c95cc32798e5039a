"""Errors of the gateway. A class carries its wire form: contract code, HTTP status, OpenAI and Anthropic type.

The sentences are fixed where the relay contract fixes them; they never carry prompts, credentials or internal reasons.
"""

from __future__ import annotations

from core.errors import ContractError
from wire.contract import ErrorCode, RequestState
from wire.engine_errors import Blame, judge_error

# Anthropic API reference, "Errors".
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# LiteLLM takes every error with the word ``invalid_request_error`` for a bad request.
_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class GatewayError(ContractError):
    """Base of the tree. ``state`` is how the request's record ends when this ends it."""

    code = ErrorCode.INTERNAL_ERROR
    status = 500
    retryable = True
    default_message = "Internal server error processing request"
    state: RequestState = RequestState.FAILED
    flag: str = "IE"
    """What a line of the access log says of it."""

    def __init__(self, message: str = "", *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message, param=param)
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        """OpenAI's word for errors of this status."""
        return _OPENAI_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    @property
    def anthropic_type(self) -> str:
        return _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")


class Refused(GatewayError, retryable=False):
    """Base of what the same request will always come to."""

    state = RequestState.REJECTED


class BadRequest(Refused, code=ErrorCode.BAD_REQUEST, status=400):
    """The body cannot be used as it is."""

    flag = "BR"
    default_message = "The request could not be understood."


class BodyTooLarge(BadRequest, code=ErrorCode.BODY_TOO_LARGE, status=413):
    """More bytes than the gateway takes."""


class BodyUnreadable(BadRequest, status=415):
    """The body is compressed or encoded in another way, or is not said to be JSON (RFC 9110, sections 8.3, 8.4, 15.5.16)."""


class RouteNotFound(BadRequest, code=ErrorCode.NOT_FOUND, status=404):
    """No such path."""

    default_message = "There is no such endpoint here. GET /v1/models lists what can be used."


class TicketUnknown(BadRequest):
    """No ticket of that id is in use, as far as this gateway knows and this caller may know."""

    code = ErrorCode.NOT_FOUND
    status = 404
    default_message = "There is no such ticket in use: it was not given here to this key, or its request has ended."


class MethodNotAllowed(BadRequest, status=405):
    """The path exists, the method does not."""


class UpgradeRequired(BadRequest, status=426):
    """A plain request to the path of a socket (RFC 9110 section 15.5.22)."""

    default_message = (
        "Nodes and workers connect here by WebSocket: send Upgrade: websocket and the node credential as x-worker-secret. "
        "A proxy before the gateway has to pass the upgrade on."
    )


class InvalidApiKey(Refused, code=ErrorCode.INVALID_API_KEY, status=401):
    """No usable client key."""

    flag = "UA"
    default_message = "API key is invalid. Incorrect API key provided: send a valid one as 'Authorization: Bearer mst_…'."
    """The first sentence is the contract's, the words after it are those by which LiteLLM knows what happened."""


class InvalidAdminToken(Refused, code=ErrorCode.INVALID_ADMIN_TOKEN, status=403):
    """No usable admin token; the relay contract answers 403."""

    flag = "UA"
    default_message = "Admin token is missing or invalid. Send it as 'Authorization: Bearer msa_…'."


class NotPermitted(Refused, code=ErrorCode.NOT_PERMITTED, status=403):
    """The role of an admin token does not allow it."""

    flag = "UA"
    default_message = "This admin token may not do this."


class ModelUnknown(Refused, code=ErrorCode.MODEL_NOT_ALLOWED, status=404):
    """Nobody has ever heard of the model."""

    flag = "NM"


class ModelNotAllowed(ModelUnknown, status=400):
    """The model is known, but not allow-listed or not for this key."""


class EndpointNotAnswered(BadRequest):
    """Nodes serve the model, and none of them answers it on this path."""

    flag = "NE"


class PathNotOffered(EndpointNotAnswered, code=ErrorCode.NOT_FOUND, status=404):
    """The gateway makes the answers of this path itself, and the model's engine cannot do what that takes."""


class PromptTooLarge(BadRequest, code=ErrorCode.PROMPT_TOO_LARGE):
    """The prompt is over the cap."""


class ContextTooLong(BadRequest, code=ErrorCode.CONTEXT_LENGTH_EXCEEDED):
    """The engine says that prompt and answer do not fit into the model's context. Tokens, 0 = it did not say.

    ``answer_tokens``: of the answer that was asked for, where the prompt alone would fit. ``is_at_least``: the prompt has
    ``prompt_tokens`` or more, because the engine stopped counting there.
    """

    flag = "CL"
    default_message = "The prompt and the answer do not fit into the model's context window."

    def __init__(
        self,
        message: str = "",
        *,
        prompt_tokens: int = 0,
        context_tokens: int = 0,
        answer_tokens: int = 0,
        is_at_least: bool = False,
    ) -> None:
        super().__init__(message, param="messages")
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
        self.answer_tokens = 0 if prompt_tokens > context_tokens else answer_tokens
        self.is_at_least = is_at_least

    def recount(self, prompt_tokens: int) -> ContextTooLong:
        """Return the same with a count of our own, unless the engine counted more."""
        return ContextTooLong(
            self.message,
            prompt_tokens=max(self.prompt_tokens, prompt_tokens),
            context_tokens=self.context_tokens,
            answer_tokens=self.answer_tokens,
        )


class ResponseNotFound(BadRequest, code=ErrorCode.RESPONSE_NOT_FOUND, status=404):
    """No stored response of that id, for this tenant."""


class MaxTokensTooLarge(BadRequest, code=ErrorCode.MAX_TOKENS_TOO_LARGE):
    """``max_tokens`` is over the cap."""


class RateLimited(GatewayError, code=ErrorCode.RATE_LIMITED, status=429):
    """The key used up its requests for now."""

    flag = "RL"
    state = RequestState.REJECTED
    default_message = "Rate limit exceeded."


class BudgetExhausted(RateLimited):
    """A limit or budget of the key or its tenant, over all gateways, is used up for now."""

    flag = "BX"
    default_message = "The budget is used up."


class OriginNotPermitted(Refused, code=ErrorCode.NOT_PERMITTED, status=403):
    """A page of a browser wants a socket that is for programs."""

    default_message = "This WebSocket is for nodes, and pages of other origins may not open it. Send no Origin header."


class NoAvailableNode(GatewayError, code=ErrorCode.NO_AVAILABLE_NODE, status=503):
    """No node can serve this now."""

    flag = "NN"
    default_message = "No workers available to handle request"


class QueueFull(NoAvailableNode):
    """The model's queue is at its bound."""

    flag = "QF"
    state = RequestState.REJECTED
    default_message = "Service temporarily at capacity, please retry"


class ProviderDisabled(NoAvailableNode):
    """Every node of the model belongs to a provider that is switched off."""

    default_message = "Provider is currently disabled"


class ProviderDeleted(NoAvailableNode):
    """The provider went away while the request waited."""

    default_message = "Internal server error processing request"


class NodeStale(NoAvailableNode, code=ErrorCode.NODE_STALE):
    """The nodes of the model stopped reporting."""

    default_message = "The nodes that serve this model have stopped reporting; please retry"


class NodeDraining(NoAvailableNode, code=ErrorCode.NODE_DRAINING):
    """The nodes of the model take no new work."""

    default_message = "The nodes that serve this model are draining; please retry"


class NodeUnhealthy(NoAvailableNode, code=ErrorCode.NODE_UNHEALTHY):
    """The nodes of the model report errors."""

    default_message = "The nodes that serve this model report an error; please retry"


class RecordsUnavailable(NoAvailableNode):
    """The request cannot be written down, so it is not accepted."""

    flag = "DB"
    state = RequestState.REJECTED
    default_message = "The request could not be recorded and was not accepted; please retry"


class BudgetUnknown(NoAvailableNode):
    """Nobody can say what is left of a budget, so the request is not accepted."""

    flag = "BU"
    state = RequestState.REJECTED
    default_message = "What is left of the budget cannot be checked now; please retry"


class QueueTimeout(GatewayError, code=ErrorCode.REQUEST_TIMEOUT, status=504, retry_after_s=5):
    """Waited as long as it may."""

    flag = "QT"
    default_message = "Request timed out waiting for worker"


class RequestTimeout(QueueTimeout):
    """Ran as long as it may."""

    flag = "RT"
    default_message = "The request exceeded its time limit"


class ForwardedRequestFailed(GatewayError, code=ErrorCode.FORWARDED_REQUEST_FAILED, status=502):
    """The node or its engine failed."""

    flag = "UF"
    default_message = "The selected node failed while processing the request."


class EngineRefused(GatewayError, code=ErrorCode.FORWARDED_REQUEST_FAILED, status=502):
    """An engine's own refusal (4xx) or failure (5xx), said in the caller's dialect with the engine's status and words.

    ``blame``: whose fault it is, by default what the status says. Only what the caller can mend ends as a refused request.
    """

    flag = "ER"

    def __init__(
        self,
        message: str,
        *,
        status: int,
        param: str | None = None,
        retry_after_s: float | None = None,
        blame: Blame | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.status = status
        self.retryable = status >= 500 or status in (408, 409, 429)
        if status < 500:
            self.code = ErrorCode.RATE_LIMITED if status == 429 else ErrorCode.BAD_REQUEST
        self.state = RequestState.REJECTED if (blame or judge_error(status)) is Blame.CALLER else RequestState.FAILED


class StreamTooLarge(ForwardedRequestFailed):
    """The answer grew over the ceiling."""

    flag = "TL"
    default_message = "stream exceeded size limit"


class RequestInterrupted(GatewayError, code=ErrorCode.REQUEST_INTERRUPTED, status=503):
    """The node was lost or taken back."""

    flag = "UC"
    state = RequestState.INTERRUPTED
    default_message = "The request was interrupted because the node was reclaimed or lost."


class RequeueExhausted(RequestInterrupted):
    """Several nodes were lost with it."""

    flag = "RX"
    default_message = "Request could not be processed after multiple attempts"


class ShuttingDown(RequestInterrupted):
    """The gateway stops."""

    flag = "SD"
    default_message = "Service temporarily unavailable while workers shut down"


class ClientLeft(GatewayError, code=ErrorCode.CLIENT_CLOSED_REQUEST, status=499, retryable=False):
    """The client closed its connection; nobody reads what we would say."""

    flag = "DC"
    state = RequestState.CANCELLED
    default_message = "The client closed the connection"


class ClientTooSlow(ClientLeft):
    """The client did not read its answer."""

    flag = "SC"
    default_message = "The client did not read its answer in time"
