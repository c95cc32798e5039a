"""How long a prompt is of which an engine said only that it is too long: clients shorten it by what they are told.

vLLM reads no more of a prompt than it has room for, so what it says is a lower bound, one token beyond the limit.
"""

from __future__ import annotations

from gateway.counting import TokenCounter, run_beside
from gateway.dialects import Surface
from gateway.dialects.messages import to_chat_body
from gateway.errors import BadRequest, ContextTooLong, GatewayError
from gateway.request.client import ClientConnection
from gateway.request.models import ModelEntry
from gateway.values import InferenceRequest


async def recount_prompt(
    counter: TokenCounter,
    error: GatewayError,
    *,
    client: ClientConnection,
    surface: Surface,
    entry: ModelEntry,
    request: InferenceRequest,
    tenant: str,
    request_id: str,
) -> GatewayError:
    """Return what to tell the client: the error with a count of ours where it has a lower bound and the client acts on it.

    ``request``: as it was asked, for the model of ``entry``. Raises ClientLeft when nobody waits for the count any more.
    """
    if not isinstance(error, ContextTooLong) or not surface.wants_count(error):
        return error
    try:
        chat, _ = await run_beside(len(request.body), lambda: to_chat_body(request.body, is_counting=True))
    except BadRequest:
        return error  # an engine that speaks the surface itself takes more than a translation carries
    counted = await client.wait_for_work(counter.count(entry, chat, tenant=tenant, request_id=request_id))
    return error.recount(counted.tokens)
