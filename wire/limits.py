"""Bounds: how a package declares its limits and time-outs, and those of the wire formats, which both ends share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

MIB = 1024 * 1024
_KEY = "bound"
Value = TypeVar("Value", int, float)


@dataclass(frozen=True, slots=True)
class Bound:
    """What is said of one field. ``then`` says what happens at it; ``setting`` names the environment variable that sets it.

    ``minimum`` is the least that the setting may be; ``factor`` is what the setting counts in (1,048,576 where it is in MiB).
    """

    name: str
    default: float
    unit: str
    then: str
    setting: str = ""
    minimum: float = 0
    factor: int = 1


def bound(default: Value, unit: str, then: str, *, setting: str = "", minimum: float = 0, factor: int = 1) -> Value:
    """Declare a field of a frozen dataclass of limits. ``unit``: ``s``, ``ms``, ``bytes``, ``characters``, ``requests`` …"""
    said = Bound("", default, unit, then, setting, minimum, factor)
    value: Value = dataclasses.field(default=default, metadata={_KEY: said})
    return value


def list_bounds(section: Any) -> Iterator[Bound]:
    """Yield what is said of each field of a dataclass of limits, in the order of its declaration."""
    for field in dataclasses.fields(section):
        if _KEY in field.metadata:
            yield dataclasses.replace(field.metadata[_KEY], name=field.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Bounds of the formats themselves: no setting reaches them, because server and runner must agree."""

    # What a request may hold, so that no engine computes for seconds before it says a word
    request_head_bytes: int = bound(64 * 1024, "bytes", "Request target and headers beyond it are refused with 431.")
    # Commas and opening brackets outside of strings. The longest list of token ids that OpenAI's API takes has 300,000.
    body_marks: int = bound(500_000, "marks", "A request body with more values is refused with 413, an engine's is not read.")
    # llama.cpp compares each name with all before it: 1,000 names cost it 3 ms, 20,000 two seconds.
    body_members: int = bound(1000, "members", "A request with a larger object is refused with 400, the field named.")
    # llama.cpp's templates take 0.9 s of a core for 4,000, minutes for 80,000.
    body_turns: int = bound(4000, "entries", "A request with more messages or input items is refused with 400.")
    # No engine reads more than some 20 digits of one, and llama.cpp repeats the whole of it in its error.
    body_number_chars: int = bound(400, "characters", "A request that holds a longer number is refused with 400.")
    # OpenAI's own bound.
    body_biases: int = bound(300, "entries", "A request with more entries in `logit_bias` is refused with 400.")
    # llama.cpp holds them against every token of its vocabulary and against each other.
    body_breakers: int = bound(100, "entries", "A request with more `dry_sequence_breakers` is refused with 400.")
    # llama.cpp's grammar of 200 properties that may be left out takes 0.1 s of a core, of 900 four seconds. Of tools, which may
    # have ``body_members``, it makes no such grammar.
    shape_members: int = bound(200, "members", "A request for an answer whose shape has a larger object is refused with 400.")
    # Of these too it makes a grammar: 0.3 s of a core for 1,000, minutes for 20,000.
    shape_choices: int = bound(1000, "entries", "A request with a longer list in tools or in a shape is refused with 400.")
    # Of ``*``, ``+``, ``?`` and ``{``. Each may end where the next begins, and llama.cpp follows all ways at once: eight tokens
    # cost it 0.06 s of a core for 50 in a row, for 200 five seconds.
    shape_repeats: int = bound(50, "repetitions", "A request with more of them in one rule or pattern is refused with 400.")
    # Frames and events
    # One large prompt must not hold up other streams.
    frame_payload_bytes: int = bound(256 * 1024, "bytes", "A body is cut into frames of at most this size.")
    stream_window_bytes: int = bound(512 * 1024, "bytes", "A node that has sent so much of one stream waits for credit.")
    event_held_bytes: int = bound(256 * 1024, "bytes", "An unfinished event that is larger is passed on in pieces.")
    stream_end_frames: int = bound(32, "frames", "Older frames of a stream are not searched for how it ended.")
    stream_end_bytes: int = bound(4096, "bytes", "Of a longer frame the events of its last bytes are searched for the end.")
    usage_body_bytes: int = bound(MIB, "bytes", "A larger unstreamed answer is passed on without looking for its usage.")
    answer_calls: int = bound(
        1024, "tool calls", "A translated answer with more ends with an error; one that is not translated passes as it is."
    )
    answer_choices: int = bound(128, "choices", "Further choices of an answer pass as they are.")
    # What an engine says of an error
    # An engine chooses the bytes: of a longer body only the beginning is read, as text.
    error_body_bytes: int = bound(256 * 1024, "bytes", "A larger error body is not read as JSON.")
    error_head_bytes: int = bound(8192, "bytes", "Only so much of an error that is no JSON is read.")
    error_quote_chars: int = bound(300, "characters", "What an engine said is cut there before it is kept or logged.")
    echo_chars: int = bound(20, "characters", "A quote ends before the first run of so many that the request holds too.")
    echo_places: int = bound(1000, "places", "A block that the request holds more often counts as an echo unseen.")
    # The texts of a form with a sound in its middle stand at the edges.
    echo_edge_bytes: int = bound(256 * 1024, "bytes", "Of a request that is no JSON, so much at each edge is compared.")
    # Addresses and the process itself
    # Nobody stands behind more proxies.
    forwarded_hops: int = bound(16, "hops", "Older hops of `X-Forwarded-For` are not looked at.")
    forwarded_judged: int = bound(4096, "addresses", "The address that was judged first is judged anew.")
    # Whoever calls ``clock.beat`` does so twice a second at least.
    standstill_s: float = bound(2.0, "s", "A process that was silent to itself for longer stood still; others' silence stops.")
    # Traces
    traces_flush_s: float = bound(3.0, "s", "A process that ends sends no more of the spans that wait.")
    traces_quiet_s: float = bound(60.0, "s", "The next complaint of the exporter of traces is logged.")
    traces_reason_chars: int = bound(300, "characters", "A complaint of the exporter is cut in the log.")
    # Op tokens, statements and receipts
    # As JSON. A statement with five proofs has a third of it.
    token_bytes: int = bound(16 * 1024, "bytes", "A larger op token is refused (`too_large`).")
    token_depth: int = bound(16, "levels", "A document that is nested deeper is refused.")
    token_text_chars: int = bound(200, "characters", "A token with a longer text is refused (`bad_field`).")
    token_signers: int = bound(64, "signers", "A token that names more is refused (`bad_field`).")
    token_least_nonce_chars: int = bound(8, "characters", "A token with a shorter nonce is refused (`bad_field`).")
    token_least_key_bytes: int = bound(16, "bytes", "A shorter shared key is refused where it is given or read.")
    least_secret_chars: int = bound(16, "characters", "A shorter secret of the operator's own is refused.")
    token_age_s: int = bound(300, "s", "An older token is expired; one with a longer life is refused.")
    token_skew_s: int = bound(60, "s", "A token from further ahead of the node's clock is not valid yet.")
    token_l0_skew_s: int = bound(300, "s", "The same for a token of level L0.")
    # No single token of level L2 blocks what comes after it for longer.
    token_fence_lead_s: int = bound(7 * 86_400, "s", "A token whose fence is further ahead of the clock is refused.")
    # A node knows the server's clock but for the time that its messages take.
    ticket_early_s: float = bound(2.0, "s", "A ticket from further ahead of the node's clock is refused.")
    receipt_text_chars: int = bound(300, "characters", "A receipt with a longer text does not hold.")
    node_name_chars: int = bound(100, "characters", "A node with a longer name gets no runner id and does not start.")


WIRE = WireLimits()
