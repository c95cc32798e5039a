"""The rows of the table, by surface. Importing this package registers all of them."""

from __future__ import annotations

from conformance.rows import (
    audio_images,
    chat_failures,
    chat_requests,
    chat_streams,
    chat_tools,
    chat_whole,
    completions,
    count_tokens,
    embeddings_rerank,
    errors,
    errors_engine,
    framing,
    messages_failures,
    messages_requests,
    messages_streams,
    messages_whole,
    models,
    responses_failures,
    responses_requests,
    responses_streams,
    responses_whole,
)

MODULES = (
    framing, chat_whole, chat_streams, chat_tools, chat_requests, chat_failures, completions, embeddings_rerank,
    responses_whole, responses_streams, responses_requests, responses_failures, messages_whole, messages_streams,
    messages_requests, messages_failures, count_tokens, models, audio_images, errors, errors_engine,
)  # fmt: skip
