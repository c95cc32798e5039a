"""OpenAI Responses said to engines that know chat completions alone, and their answers said back. Pure."""

from __future__ import annotations

from gateway.dialects.responses.answer import ResponsesTranslator
from gateway.dialects.responses.items import SUMMARY_MARK
from gateway.dialects.responses.object import (
    ResponsesBody,
    list_input_items,
    make_response_id,
    read_responses_body,
    render_error,
)
from gateway.dialects.responses.request import COMPACT_PATH, render_failed_response, translate_compact, translate_responses

__all__ = [
    "COMPACT_PATH",
    "SUMMARY_MARK",
    "ResponsesBody",
    "ResponsesTranslator",
    "list_input_items",
    "make_response_id",
    "read_responses_body",
    "render_error",
    "render_failed_response",
    "translate_compact",
    "translate_responses",
]
