"""In whose words an engine is asked: the client's, and others where it refuses those or would overlook something."""

from __future__ import annotations

from gateway.dialects import Surface
from gateway.dialects.foreign_tools import has_foreign_tools
from gateway.dialects.unread_parts import holds_part
from gateway.outcome import RetryReason
from gateway.values import InferenceRequest
from nodes.links import Link
from nodes.states import SPOKEN_THROUGH
from wire.messages_fields import HONOURED, find_unhonoured

_UNKNOWN_PATH = frozenset({404, 405, 501})
_DECLARED_UNKNOWN = frozenset({404, 405})
"""Of a path that the box declares; engines say 501 of a field on a path that they do know."""
_UNREADABLE = frozenset({400, 422})

_MESSAGES = "/v1/messages"
_LEAVES_PARTS_OUT = frozenset({"llamacpp", "llama-server"})
_LEFT_OUT = frozenset({"document", "search_result"})
"""What the Messages of these engines answer as if it were not there. Translated it is text, or a file that they refuse."""


def choose_path(link: Link, request: InferenceRequest) -> str:
    """Return the API path on which a node is asked: the request's, or the one it is translated to.

    Translated is also what the engine's own Messages would take and forget.
    """
    path = link.find_path(request.model, request.path) or request.path
    engines = link.engines.get(request.model, frozenset())
    if path != _MESSAGES or engines.isdisjoint(HONOURED) or not link.answers(request.model, SPOKEN_THROUGH[path]):
        return path
    is_left_out = not engines.isdisjoint(_LEAVES_PARTS_OUT) and holds_part(request.body, _LEFT_OUT)
    return SPOKEN_THROUGH[path] if is_left_out or find_unhonoured(engines, request.body) else path


def find_other_words(
    link: Link, surface: Surface | None, request: InferenceRequest, *, status: int, body: bytes
) -> RetryReason | None:
    """Return why a request that was passed on untouched is to be translated now, None when the refusal stands.

    What a box says of its paths may be a guess, for a server of somebody else's, and one that says nothing may know any;
    another request may have found out while this one was on its way. An engine that knows the path may still refuse tools
    which only the provider runs, and agents offer those to everybody: a translation leaves them out.
    """
    path, model = request.endpoint, request.model
    if surface is None or surface.translate is None or not link.answers(model, SPOKEN_THROUGH.get(path, "")):
        return None
    if status in (_DECLARED_UNKNOWN if model in link.endpoints else _UNKNOWN_PATH):
        is_about_model = b"model" in body[:8192].lower()  # then it is not the path that it does not know
        return None if is_about_model else RetryReason.UNSPOKEN
    if status in _UNREADABLE and has_foreign_tools(request.body, is_anthropic=surface.is_anthropic):
        return RetryReason.FOREIGN_TOOLS
    return None
