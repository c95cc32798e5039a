"""Token counts beside the inference queue: a prompt is counted while others generate, and takes no turn from them.

Bounded all the same: few counts at once for each model, a fair and short line of those who wait, and an answer in seconds
or a refusal. An engine goes on with a long text when nobody waits for it any more, so its turn is taken until it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from weakref import WeakKeyDictionary

import msgspec

from runner.engines.port import TokenCounter
from runner.errors import EngineError, EngineNotReached, EngineUnavailable, InvalidRequest, ModalityUnsupported
from runner.limits import limits
from runner.pool import Model
from runner.queue import FairQueue, QueueLimits, Turn, WaitBudget
from runner.serving.request import Inference
from wire.unreadable import UNREADABLE

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text_decoder = msgspec.json.Decoder(str)


class Counting:
    """The lines in front of the models that count. ``limit_s``: longest wait for a turn, and then for the engine."""

    def __init__(self, *, limit_s: float | None = None) -> None:
        self._limits = bounds = limits().serving
        self._limit_s = bounds.count_s if limit_s is None else limit_s
        self._waiting = QueueLimits(
            pending_per_key=bounds.count_waiting_of_tenant, pending_per_executor=bounds.count_waiting_of_model
        )
        self._working: set[asyncio.Task[bytes]] = set()
        self._queues: WeakKeyDictionary[Model, FairQueue] = WeakKeyDictionary()
        self._budget = WaitBudget(bounds.count_waiting)

    async def count(self, model: Model, request: Inference) -> tuple[bytes, float]:
        """Return the answer ``{"count", "max_model_len"}`` as JSON, and the milliseconds that were waited for a turn.

        Raises RequestRefused.
        """
        fields = {**read_question(request.body), "model": msgspec.Raw(msgspec.json.encode(model.model_id))}
        queue = self._queue_of(model)
        turn = await queue.enter(tenant=request.tenant, priority=request.priority, timeout_s=self._limit_s)
        work = asyncio.create_task(_ask(model, fields))
        self._working.add(work)
        work.add_done_callback(lambda done: self._end(done, queue, turn))
        await asyncio.wait({work}, timeout=self._limit_s)
        if not work.done():
            raise EngineUnavailable(f"The engine did not count within {self._limit_s:g} s.", retry_after_s=2)
        return work.result(), turn.waited_ms

    def _end(self, work: asyncio.Task[bytes], queue: FairQueue, turn: Turn) -> None:
        self._working.discard(work)
        queue.leave(turn)
        if not work.cancelled():
            work.exception()  # whoever still waited has heard it

    def _queue_of(self, model: Model) -> FairQueue:
        queue = self._queues.get(model)
        if queue is None:
            queue = FairQueue(
                slots=self._limits.counts, limits=self._waiting, budget=self._budget, weight_of=lambda _tenant: 1.0
            )
            self._queues[model] = queue
        return queue


def read_question(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the members of a body that has either ``messages``, as a list, or ``prompt``, as a text. Raises InvalidRequest."""
    if len(body) > limits().serving.count_bytes:
        raise InvalidRequest(f"The tokens of a body of more than {limits().serving.count_bytes} bytes are not counted.")
    try:
        fields = _fields_decoder.decode(body)
    except UNREADABLE:
        raise InvalidRequest("The request body must be a JSON object.") from None
    fields = {name: value for name, value in fields.items() if len(memoryview(value)) > 4 or bytes(value) != b"null"}
    if ("messages" in fields) == ("prompt" in fields):
        raise InvalidRequest("Send either 'messages' or 'prompt'.", param="messages")
    if "messages" in fields and bytes(memoryview(fields["messages"])[:1]) != b"[":
        raise InvalidRequest("The field 'messages' must be a list.", param="messages")
    if "prompt" in fields:
        _check_text(fields["prompt"])
    return fields


def _check_text(prompt: msgspec.Raw) -> None:
    try:
        _text_decoder.decode(prompt)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequest("The field 'prompt' must be a text.", param="prompt") from None


async def _ask(model: Model, fields: Mapping[str, msgspec.Raw]) -> bytes:
    replica = model.pick()
    if replica is None:
        raise EngineNotReached(f"{model.model_id} has no replica that serves right now.", retry_after_s=2)
    engine = replica.supervisor.engine
    if not engine.capabilities.counts_tokens or not isinstance(engine, TokenCounter):
        raise ModalityUnsupported(f"The engine of {model.model_id} counts no tokens.", param="model")
    try:
        count = await engine.count_tokens(fields)
    except EngineError as error:
        raise EngineUnavailable(f"The engine did not count: {error}.", retry_after_s=2) from None
    return msgspec.json.encode({"count": count, "max_model_len": replica.context_tokens})
