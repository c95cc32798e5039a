"""Messages for engines that speak chat completions only: the request there, the answer back. Pure."""

from __future__ import annotations

from gateway.dialects.chat import Translation
from gateway.dialects.messages.answer import MessagesTranslator
from gateway.dialects.messages.request import to_chat_body
from gateway.values import CHAT_PATH, InferenceRequest

__all__ = ["MessagesTranslator", "to_chat_body", "translate_messages"]


def translate_messages(request: InferenceRequest) -> Translation:
    """Return a request of ``/v1/messages`` as a chat request. Raises BadRequest naming the field that cannot be carried."""
    body, ignored = to_chat_body(request.body)
    return Translation(path=CHAT_PATH, body=body, open_answer=MessagesTranslator, ignored=ignored)
