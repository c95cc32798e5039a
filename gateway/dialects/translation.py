"""The contract of a translation: a request said in another dialect, and its answer said back.

A translation is chosen once a box is found that does not speak the client's surface. Whoever writes one keeps to this:
what cannot be carried is refused by name (``BadRequest(param=...)``), what may be left out is listed in ``ignored``, and
an answer never pretends to be whole: after a failure there is no closing event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gateway.errors import GatewayError
from wire import clock
from wire.bridge import TokenCounts


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What an answer may say about its circumstances. ``created``: Unix seconds.

    ``clock``: monotonic seconds, read when the answer is opened, at its first text and at its end. ``received_at``: what it
    showed when the request came in, None = nobody noted it.
    """

    request_id: str
    model: str
    created: int
    clock: Callable[[], float] = clock.monotonic
    received_at: float | None = None


class AnswerTranslator(Protocol):
    """One attempt's answer. Streamed: ``feed`` …, then ``finish``. Whole: ``translate_whole``. Never both."""

    @property
    def usage(self) -> TokenCounts | None:
        """What the engine counted, as far as it said."""

    @property
    def failure(self) -> GatewayError | None:
        """Why the answer is over, if it is: an error in the stream, or bytes that are no chat answer.

        Set by ``feed``, ``finish`` or ``translate_whole``; whoever called says it in the client's dialect and ends.
        """

    @property
    def kept(self) -> bytes | None:
        """The whole answer as one JSON object of this dialect once it is finished, for surfaces that keep answers."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the engine's event stream, cut anywhere; return whole events of this dialect, or nothing."""

    def finish(self) -> bytes:
        """Return the closing events. An engine that ended before its answer was whole is a ``failure``, not an end."""

    def translate_whole(self, body: bytes) -> bytes:
        """Return an unstreamed answer (HTTP 2xx) in this dialect."""


@runtime_checkable
class FailingTranslator(Protocol):
    """A translator of a dialect that ends a broken stream with more than one line about the error."""

    def fail(self, error: GatewayError) -> bytes:
        """Return the events that end the stream with this error."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A request as the box gets it. ``path``: the API path it is asked on. ``ignored``: names of fields that were left out."""

    path: str
    body: bytes
    open_answer: Callable[[AnswerContext], AnswerTranslator]
    ignored: tuple[str, ...] = ()
