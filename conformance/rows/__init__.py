"""The rows of the table, by endpoint. Importing this package registers all of them."""

from __future__ import annotations

from conformance.rows import chat, errors, http, messages, modalities, models, responses

MODULES = (http, chat, modalities, responses, messages, models, errors)
