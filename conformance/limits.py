"""Bounds of the suite and of its scripted engine. Nothing sets them; what a user may choose is an option of the command."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The comment above a field says what happens at it; ``_s`` are seconds."""

    # More rows wait their turn, unless ``--jobs`` says another number.
    simultaneous: int = 4
    # A row may ask several times; it fails after so many times the time-out of one answer.
    row_answers: int = 3
    # A row fails: nothing takes its connection. The official SDKs wait as long.
    connect_s: float = 5.0
    # A row fails: a request that is to be refused was not.
    refused_s: float = 30.0
    # A row fails: the connection was not closed.
    close_s: float = 30.0
    # A row fails: the engine still works for a client that has left.
    heard_s: float = 30.0
    # A row fails: a stream was silent for longer.
    keep_alive_s: float = 10.0
    # A row fails: every piece came later. A delayed ACK takes 40 ms; the engine says something every 5.
    gap_s: float = 0.030
    # A row fails that found such gaps so often.
    gap_tries: int = 3
    # Answers are read in pieces of this size.
    read_bytes: int = 64 * 1024

    # Enough for an answer, few enough for a slow machine.
    answer_tokens: int = 24
    # Enough for a call of a tool.
    call_tokens: int = 200
    # The largest image that a client sends.
    image_bytes: int = 6 * 1024 * 1024
    # The longest instruction that a client sends.
    text_chars: int = 60_000
    # The body that a server is to refuse by its head.
    claimed_bytes: int = 300 * 1024 * 1024
    # Two embeddings that differ by less are one.
    tolerance: float = 1e-5
    # What a finding quotes is cut.
    shown_chars: int = 160
    # The report breaks a line.
    line_chars: int = 130

    # The scripted engine refuses a longer body.
    engine_body_bytes: int = 256 * 1024 * 1024
    # Pieces of a stream of the scripted engine before what breaks it.
    broken_after: int = 2
    # An endless stream of it ends, at 20 ms a piece later than anybody waits for.
    endless_pieces: int = 10_000
    # Its embeddings have so many numbers, unless the request says another number.
    dimensions: int = 8


LIMITS = Limits()
