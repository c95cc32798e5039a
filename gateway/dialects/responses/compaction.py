"""``/v1/responses/compact``: a conversation as its user's messages and one item that holds the model's summary of it. Pure.

The summary is made by the model that was asked, in a chat completion like any other. It travels in ``encrypted_content``, where
clients keep what they pass on unread; here it is packed and not encrypted: the client has seen every word it is made of.
Source: OpenAI API reference, "Compact a response".
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from gateway.dialects.responses.fields import ResponsesRequest, read_request
from gateway.dialects.responses.items import SUMMARY_MARK, Item
from gateway.dialects.responses.listing import list_input_items
from gateway.dialects.responses.request import translate_responses
from gateway.dialects.translation import AnswerContext, AnswerTranslator, Translation
from gateway.errors import ForwardedRequestFailed, GatewayError
from gateway.values import InferenceRequest
from wire.bridge import TokenCounts

COMPACT_PATH = "/v1/responses/compact"
_encode = msgspec.json.Encoder().encode
_ASK = (
    "Summarise this conversation so that you can go on with it from the summary alone. Keep what the user wants, what was "
    "decided and found out, names, numbers, paths and code that still matter, and what is left to do. Write the summary only."
)


class _Part(msgspec.Struct):
    text: str = ""


class _Output(msgspec.Struct):
    type: str = ""
    content: list[_Part] = []


class _Response(msgspec.Struct):
    output: list[_Output] = []
    usage: msgspec.Raw = msgspec.Raw(b"null")


def translate_compact(
    request: InferenceRequest,
    *,
    history: Sequence[bytes] = (),
    previous_response_id: str | None = None,
    is_stored: bool = False,
    response_id: str | None = None,
) -> Translation:
    """Return the request as a chat completion that asks for the summary. The arguments are those of ``translate_responses``.

    Raises BadRequest naming what a chat completion cannot carry.
    """
    asked, fields = read_request(request.body)
    kept = [item for item in [*history, *list_input_items(request.body)] if _is_users(msgspec.json.decode(item))]
    said = {**fields, "input": msgspec.Raw(_encode([*_list_input(asked), {"role": "user", "content": _ASK}]))}
    said.pop("text", None)  # the shape of answers, which a summary need not have
    if asked.tools:
        said["tool_choice"] = msgspec.Raw(b'"none"')
    translation = translate_responses(
        msgspec.structs.replace(request, body=_encode(said)),
        history=history,
        previous_response_id=previous_response_id,
        is_stored=is_stored,
        response_id=response_id,
    )
    return Translation(
        path=translation.path,
        body=translation.body,
        open_answer=partial(CompactionTranslator, translation.open_answer, kept),
        ignored=translation.ignored,
    )


class CompactionTranslator:
    """The answer: ``kept`` are the user's messages as JSON items, oldest first. It is never streamed."""

    kept = None

    def __init__(
        self, open_answer: Callable[[AnswerContext], AnswerTranslator], kept: Sequence[bytes], context: AnswerContext
    ) -> None:
        self._answer = open_answer(context)
        self._messages = kept
        self._context = context
        self._failure: GatewayError | None = None

    @property
    def usage(self) -> TokenCounts | None:
        """What the engine counted, as far as it said."""
        return self._answer.usage

    @property
    def failure(self) -> GatewayError | None:
        """Why there is no summary, if there is none."""
        return self._failure or self._answer.failure

    def feed(self, data: bytes) -> bytes:
        """Take bytes of a stream that nobody asked for."""
        del data
        self._failure = ForwardedRequestFailed("The engine streamed an answer that was asked for as a whole.")
        return b""

    def finish(self) -> bytes:
        """Return nothing: there is no stream."""
        return b""

    def translate_whole(self, body: bytes) -> bytes:
        """Return an unstreamed chat answer as a compacted response; nothing and a ``failure`` when it holds no summary."""
        whole = self._answer.translate_whole(body)
        if self.failure is not None:
            return b""
        response = msgspec.json.decode(whole, type=_Response)
        texts = [part.text for item in response.output if item.type == "message" for part in item.content]
        summary = "".join(texts).strip()
        if not summary:
            self._failure = ForwardedRequestFailed("The model answered without a summary.")
            return b""
        stem = self._context.request_id.removeprefix("req_")
        item = {"id": f"cmp_{stem}", "type": "compaction", "encrypted_content": pack_summary(summary)}
        output = b",".join([*self._messages, _encode(item)])
        return b'{"id":"resp_%b","object":"response.compaction","created_at":%d,"output":[%b],"usage":%b}' % (
            stem.encode(),
            self._context.created,
            output,
            bytes(response.usage),
        )


def pack_summary(summary: str) -> str:
    """Return what ``encrypted_content`` says of a summary; ``items.read_summary`` reads it."""
    return SUMMARY_MARK + base64.b64encode(summary.encode()).decode()


def _is_users(item: Item) -> bool:
    return item.get("type") == "message" and item.get("role") == "user"


def _list_input(asked: ResponsesRequest) -> list[object]:
    if isinstance(asked.input, str):
        return [{"role": "user", "content": asked.input}]
    return list(asked.input or [])
