"""OpenAI Responses said to engines that know chat completions alone, and their answers said back. Pure."""

from __future__ import annotations

from gateway.dialects.responses.compaction import COMPACT_PATH, translate_compact
from gateway.dialects.responses.fields import ResponsesBody, read_responses_body
from gateway.dialects.responses.items import SUMMARY_MARK
from gateway.dialects.responses.listing import list_input_items
from gateway.dialects.responses.object import make_response_id, render_error
from gateway.dialects.responses.request import render_failed_response, translate_responses
from gateway.dialects.responses.stream import ResponsesTranslator

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
