"""The rows of the table, by endpoint."""

from __future__ import annotations

from conformance.rows import chat, errors, http, messages, modalities, models, responses

EVERY_ROW = (
    *http.ROWS, *chat.ROWS, *modalities.ROWS, *responses.ROWS, *messages.ROWS, *models.ROWS, *errors.ROWS,
)  # fmt: skip
