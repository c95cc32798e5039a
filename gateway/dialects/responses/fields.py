"""The top level of a request for /v1/responses: what policy looks at, and what a translation reads.

Sources: OpenAI API reference, "Create a model response"; llm-pool specification, "POST /v1/responses".
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from gateway.dialects.faults import join_fault
from gateway.dialects.responses.pool import Decoding
from gateway.errors import BadRequest
from gateway.whole_numbers import WholeNumber, read_whole_number
from wire.unreadable import UNREADABLE

_Read = TypeVar("_Read")
Json = dict[str, Any]
"""An object that is read elsewhere. Any, for msgspec would call the hook for each ``object``."""


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    max_output_tokens: WholeNumber | None = None
    decoding: Decoding | None = None
    allow_remote: bool | None = None
    source_lang_code: str | None = None
    target_lang_code: str | None = None

    @property
    def uses_pool_fields(self) -> bool:
        """Whether it has a field that only llm-pool knows."""
        pool_only = (self.decoding, self.allow_remote, self.source_lang_code, self.target_lang_code)
        return any(value is not None for value in pool_only)

    @property
    def token_limits(self) -> dict[str, int]:
        """Every limit of output tokens that is asked for, by the field that asks for it."""
        pool_limit = self.decoding.max_tokens if self.decoding is not None else None
        limits = {"max_output_tokens": self.max_output_tokens, "decoding.max_tokens": pool_limit}
        return {name: limit for name, limit in limits.items() if limit is not None}


class ResponsesBody(_Common, frozen=True, kw_only=True):
    """What policy looks at. ``input`` is the JSON as it came; what stands inside it is not checked here."""

    input: msgspec.Raw = msgspec.Raw()


class TextConfig(msgspec.Struct, frozen=True):
    """``text``: the format of the answer and how long-winded it is."""

    format: Json | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, frozen=True):
    """``reasoning``: how hard to think, and whether to sum it up, which nothing here can."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(_Common, frozen=True, kw_only=True):
    """What a translation reads. Everything else of the body goes on as it is."""

    input: str | list[Json] | None = None
    instructions: str | None = None
    include: list[str] | None = None
    metadata: Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: WholeNumber | None = None
    max_tool_calls: WholeNumber | None = None
    truncation: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None


_body_decoder = msgspec.json.Decoder(ResponsesBody, dec_hook=read_whole_number)
_request_decoder = msgspec.json.Decoder(ResponsesRequest, dec_hook=read_whole_number)
_all_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_responses_body(body: bytes) -> ResponsesBody:
    """Return what policy looks at. Raises BadRequest naming the field at fault."""
    fields = _decode(_body_decoder, body)
    text = bytes(fields.input).strip()
    if text in {b"", b"null"}:
        if fields.previous_response_id is None and fields.conversation is None and fields.prompt is None:
            raise BadRequest("The field 'input' is required.", param="input")
    elif text[:1] not in {b'"', b"["}:
        raise BadRequest("The field 'input' must be text or a list of items.", param="input")
    elif text[:1] == b"[" and text[1:].lstrip().startswith(b"]"):
        raise BadRequest("The field 'input' must not be empty.", param="input")
    for name, limit in fields.token_limits.items():
        if limit < 1:
            raise BadRequest(f"The field '{name}' must be at least 1.", param=name)
    return fields


def read_request(body: bytes) -> tuple[ResponsesRequest, dict[str, msgspec.Raw]]:
    """Return what a translation reads, and every top-level field as it came. Raises BadRequest naming the field at fault."""
    return _decode(_request_decoder, body), _decode(_all_decoder, body)


def _decode(decoder: msgspec.json.Decoder[_Read], body: bytes) -> _Read:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        reason, param = join_fault(error)
        raise BadRequest(f"Invalid request body: {reason}.", param=param) from None
    except UNREADABLE as error:
        raise BadRequest(f"The request body is not valid JSON: {error}.") from None
