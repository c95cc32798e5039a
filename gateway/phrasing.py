"""Whether a request that an engine refused as it stands may be said to it in other words."""

from __future__ import annotations

from gateway.dialects import Surface
from gateway.dialects.foreign_tools import has_foreign_tools
from gateway.outcome import RetryReason
from gateway.values import InferenceRequest
from nodes.links import Link
from nodes.states import SPOKEN_THROUGH

_UNKNOWN_PATH = frozenset({404, 405, 501})
_UNREADABLE = frozenset({400, 422})


def find_other_words(
    link: Link, surface: Surface | None, request: InferenceRequest, *, status: int, body: bytes
) -> RetryReason | None:
    """Return why a request that was passed on untouched is to be translated now, None when the refusal stands.

    A box that declares no paths may not know this one; another request may have found that out while this one was on its way.
    An engine that knows it may still refuse tools which only the provider runs, and agents offer those to everybody: a
    translation leaves them out.
    """
    path, model = request.endpoint, request.model
    if surface is None or surface.translate is None or not link.answers(model, SPOKEN_THROUGH.get(path, "")):
        return None
    if status in _UNKNOWN_PATH and model not in link.endpoints:
        is_about_model = b"model" in body[:8192].lower()  # then it is not the path that it does not know
        return None if is_about_model else RetryReason.UNSPOKEN
    if status in _UNREADABLE and has_foreign_tools(request.body, is_anthropic=surface.is_anthropic):
        return RetryReason.FOREIGN_TOOLS
    return None
