"""What happens to an answer between box and client when it is not passed on as it is: translation, and the pool's numbers."""

from __future__ import annotations

from collections.abc import Callable

from gateway.dialects.pool_meta import MetaStream, PoolMeta, add_meta
from gateway.dialects.translation import AnswerTranslator, FailingTranslator
from gateway.errors import GatewayError
from wire.bridge import TokenCounts
from wire.tidy import ChatTidier


class Rewriter:
    """One attempt's answer, rewritten. ``measure``: given when the client asked for the pool's numbers.

    ``tidier``: given for a chat stream that is passed on and put right for strict clients.
    """

    def __init__(
        self,
        translator: AnswerTranslator | None,
        measure: Callable[[], PoolMeta] | None,
        tidier: ChatTidier | None = None,
    ) -> None:
        self.translator = translator
        self._tidier = tidier
        self._measure = measure
        self._meta = MetaStream(measure) if measure is not None else None

    @property
    def failure(self) -> GatewayError | None:
        """Why the answer is over, if it is."""
        return self.translator.failure if self.translator is not None else None

    @property
    def usage(self) -> TokenCounts | None:
        """What the translator counted."""
        return self.translator.usage if self.translator is not None else None

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the engine's stream; return those for the client."""
        if self.translator is not None:
            data = self.translator.feed(data)
        elif self._tidier is not None:
            data = self._tidier.feed(data)
        return self._meta.feed(data) if self._meta is not None and data else data

    def finish(self) -> bytes:
        """Return the closing events; after a failure only what came before it."""
        last = b""
        if self.translator is not None:
            last = self.translator.finish()
        elif self._tidier is not None:
            last = self._tidier.finish()
        return last if self._meta is None else self._meta.feed(last) + self._meta.finish()

    def rewrite_whole(self, body: bytes) -> bytes:
        """Return an unstreamed answer as the client gets it."""
        if self.translator is not None:
            body = self.translator.translate_whole(body)
        return add_meta(body, self._measure()) if self._measure is not None and self.failure is None else body

    def render_failure(self, error: GatewayError) -> bytes:
        """Return the events by which this dialect ends a broken stream, or nothing when one error event does."""
        return self.translator.fail(error) if isinstance(self.translator, FailingTranslator) else b""
