"""Candidates: the models that may serve a request, and the API path and dialect in which a node of theirs is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from gateway.dialects.body import has_foreign_tools, holds_part
from gateway.dialects.chat import Translation
from gateway.dialects.surface import Surface
from gateway.errors import BadRequest, EndpointNotAnswered
from gateway.request.outcomes import RetryReason
from gateway.values import CHAT_PATH, InferenceRequest, ModelEntry
from nodes.links import Link
from nodes.states import POOL_RESPONSES
from wire.messages_fields import HONOURED, find_unhonoured

_UNKNOWN_PATH = frozenset({404, 405, 501})
# Of a path that the node declares; engines say 501 of a field on a path that they do know.
_DECLARED_UNKNOWN = frozenset({404, 405})
_UNREADABLE = frozenset({400, 422})

_MESSAGES = "/v1/messages"
_LEAVES_PARTS_OUT = frozenset({"llamacpp", "llama-server"})
_LEFT_OUT = frozenset({"document", "search_result"})
"""What the Messages of these engines answer as if it were not there. Translated it is text, or a file that they refuse."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A model that may serve a request, and the request as that model's nodes are sent it.

    ``asked``: the request as it came. ``rename``: how it is said to another model than it names. ``translate``: how it is said
    on another API path than the client's; None = it cannot be.
    """

    entry: ModelEntry
    asked: InferenceRequest
    rename: Callable[[InferenceRequest, str], InferenceRequest] | None = None
    translate: Callable[[InferenceRequest], Translation] | None = None
    unsaid: BadRequest | None = None
    """Why it cannot be translated, while it waits for a node that takes it as it is."""
    _request: InferenceRequest | None = None
    _translation: Translation | None = None

    @property
    def request(self) -> InferenceRequest:
        # Made when it is first needed: its body may be large and the models many.
        if self._request is None:
            self._request = self.asked if self.rename is None else self.rename(self.asked, self.entry.name)
        return self._request

    def choose_translation(self, path: str) -> Translation | None:
        """Return the request as it is said on ``path``, None where that is the client's own. Raises BadRequest."""
        if path in (self.request.endpoint, POOL_RESPONSES):
            return None
        if self._translation is None:
            if self.translate is None:
                asked, model = self.request.endpoint, self.request.model
                raise EndpointNotAnswered(f"The model '{model}' does not answer {asked}.", param="model")
            self._translation = self.translate(self.request)
        return self._translation

    def send_on(self, path: str) -> None:
        self.asked = self._request = msgspec.structs.replace(self.request, paths=(path,))


def choose_path(link: Link, request: InferenceRequest) -> str:
    """Return the API path on which a node is asked: the request's, or the one it is translated to."""
    path = link.find_path(request.model, request.paths) or request.paths[0]
    if path != _MESSAGES:
        return path
    engines = link.engines.get(request.model, frozenset())
    if engines.isdisjoint(HONOURED) or not link.answers(request.model, CHAT_PATH):
        return path
    # An engine's own Messages would take some fields and parts, and forget them.
    is_left_out = not engines.isdisjoint(_LEAVES_PARTS_OUT) and holds_part(request.body, _LEFT_OUT)
    return CHAT_PATH if is_left_out or find_unhonoured(engines, request.body) else path


def find_other_words(
    link: Link, surface: Surface | None, request: InferenceRequest, *, status: int, body: bytes
) -> RetryReason | None:
    """Return why a request that was passed on untouched is to be translated now, None when the refusal stands."""
    model = request.model
    if surface is None or surface.translate is None or not link.answers(model, CHAT_PATH):
        return None
    # What a node says of its paths may be a guess, for a server of somebody else's, and one that says nothing may know any;
    # another request may have found out while this one was on its way.
    if status in (_DECLARED_UNKNOWN if model in link.endpoints else _UNKNOWN_PATH):
        is_about_model = b"model" in body[:8192].lower()  # then it is not the path that it does not know
        return None if is_about_model else RetryReason.UNSPOKEN
    # Agents offer tools which only the provider runs to everybody: a translation leaves them out.
    if status in _UNREADABLE and has_foreign_tools(request.body, is_anthropic=surface.is_anthropic):
        return RetryReason.FOREIGN_TOOLS
    return None
