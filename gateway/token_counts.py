"""How many tokens a prompt has: by a tokenizer of ours, else by a node that serves the model, else by an estimate."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from core.limits import limits
from gateway.tokenizers import ProcessLost, TokenizerProcess, UnusableFolder, estimate_tokens, read_prompt
from gateway.values import ModelEntry
from nodes.links import EndKind, Link, LinkCondition, LinkEnd, LinkRegistry, Sink
from nodes.session import OpenRequest
from nodes.states import TOKENIZE
from wire import clock
from wire.bridge import CANCEL_TIMEOUT

logger = logging.getLogger("muster.gateway")

T = TypeVar("T")
_HEADERS = {"content-type": "application/json"}


class Source(StrEnum):
    """Who counted, as ``x-muster-token-count`` says it."""

    TOKENIZER = "tokenizer"
    ENGINE = "engine"
    ESTIMATE = "estimate"


@dataclass(frozen=True, slots=True)
class Count:
    """``is_estimated``: some part of it is not counted but guessed. ``node``: the node that counted, if one did."""

    tokens: int
    source: Source
    is_estimated: bool = False
    node: str = ""


class _Counted(msgspec.Struct):
    count: Annotated[int, msgspec.Meta(ge=0, le=10**9)]


_decoder = msgspec.json.Decoder(_Counted)


class Reply(Sink):
    """The sink of one exchange. ``whole`` is done with status and body, or with None when it broke."""

    def __init__(self) -> None:
        self.whole: asyncio.Future[tuple[int, bytes] | None] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._body = bytearray()

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        del headers
        self._status = status

    def on_data(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > limits().gateway.count_answer_bytes:
            self._body.clear()
            self._finish(None)

    def on_end(self, end: LinkEnd) -> None:
        self._finish((self._status, bytes(self._body)) if end.kind is EndKind.COMPLETE else None)

    def _finish(self, found: tuple[int, bytes] | None) -> None:
        if not self.whole.done():
            self.whole.set_result(found)


def find_counting(registry: LinkRegistry, model: str) -> Sequence[Link]:
    """Return the links whose nodes say that they count for the model and can be asked now, the least loaded first."""
    able = [
        link
        for link in registry.links_for(model)
        if TOKENIZE in link.endpoints.get(model, ()) and link.has_clear_line and link.condition() is LinkCondition.READY
    ]
    return sorted(able, key=lambda link: link.load)


async def exchange(link: Link, request: OpenRequest) -> tuple[int, bytes] | None:
    """Ask a node something short that takes no slot, and that nothing depends on.

    Return status and body of its answer, None when it breaks. Raises TimeoutError after the request's deadline.
    """
    reply = Reply()
    stream = link.open_stream(request, reply)
    try:
        async with asyncio.timeout(request.deadline_ms / 1000):
            return await reply.whole
    finally:
        stream.cancel(CANCEL_TIMEOUT)  # harmless when it is over


async def ask_node(link: Link, *, model: str, body: bytes, tenant: str, request_id: str, deadline_ms: int) -> int | None:
    answer = await exchange(
        link,
        OpenRequest(
            request_id=request_id,
            attempt=1,
            model=model,
            path=TOKENIZE,
            body=body,
            headers=_HEADERS,
            is_streaming=False,
            deadline_ms=deadline_ms,
            tenant=tenant,
        ),
    )
    if answer is None or answer[0] != 200:
        return None
    try:
        return _decoder.decode(answer[1]).count
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class TokenCounter:
    """Counts prompts of chat completions. ``root``: where tokenizers lie, None = nowhere."""

    def __init__(self, registry: LinkRegistry, root: Path | None) -> None:
        self._registry = registry
        self._root = root
        self._threads = ThreadPoolExecutor(limits().gateway.count_threads, thread_name_prefix="count")
        self._processes: set[TokenizerProcess] = set()
        self._idle: list[TokenizerProcess] = []
        """Of ``_processes``, which begin when one is needed and stay."""
        self._busy = 0
        self._asking = asyncio.Semaphore(limits().gateway.count_asked)
        self._complained: dict[str, float] = {}
        # When a process was lost over a tokenizer: it rests then, so that nobody has one process after the other killed.
        self._lost: dict[str, float] = {}

    def close(self) -> None:
        self._root = None
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in list(self._processes):
            process.close()

    async def count(self, entry: ModelEntry, chat: bytes, *, tenant: str, request_id: str) -> Count:
        """Return how many tokens the prompt of a chat completion has; ``chat`` is its body, for that model."""
        if len(chat) <= limits().gateway.count_body_bytes:
            found = await self._ask_tokenizer(entry, chat)
            if found is None:
                found = await self._ask_nodes(entry.name, chat, tenant, request_id)
            if found is not None:
                return found
        tokens = await run_beside(len(chat), lambda: estimate_tokens(read_prompt(chat)))
        return Count(tokens, Source.ESTIMATE, is_estimated=True)

    async def _ask_tokenizer(self, entry: ModelEntry, chat: bytes) -> Count | None:
        """Count in a process. What cannot be counted so in time is None; its thread is not waited for, but counted as busy."""
        root, name = self._root, entry.tokenizer
        if root is None or not name or self._busy >= limits().gateway.count_threads + limits().gateway.count_waiting:
            return None
        if clock.monotonic() - self._lost.get(name, -math.inf) < limits().gateway.count_rest_s:
            return None
        self._busy += 1
        job = asyncio.get_running_loop().run_in_executor(self._threads, self._count, root, name, chat)
        job.add_done_callback(lambda done: self._take_end(entry, done))
        await asyncio.wait({job}, timeout=limits().gateway.count_thread_s)
        # Whatever went wrong over there is an outcome here: there are two more ways to a number.
        if not job.done() or job.cancelled() or job.exception() is not None:
            return None
        counted = job.result()
        return Count(counted[0], Source.TOKENIZER, is_estimated=counted[1]) if counted is not None else None

    def _count(self, root: Path, name: str, chat: bytes) -> tuple[int, bool] | None:
        try:
            process = self._idle.pop()
        except IndexError:
            process = TokenizerProcess(root)
        self._processes.add(process)
        try:
            return process.count(name, chat)
        finally:
            if process.is_lost:
                self._processes.discard(process)
            else:
                self._idle.append(process)

    def _take_end(self, entry: ModelEntry, job: asyncio.Future[tuple[int, bool] | None]) -> None:
        self._busy -= 1
        error = None if job.cancelled() else job.exception()
        if isinstance(error, ProcessLost):
            self._note(self._lost, entry.tokenizer)
        if error is not None:
            self._complain(entry.name, str(error) if isinstance(error, UnusableFolder | ProcessLost) else type(error).__name__)

    def _complain(self, model: str, reason: str) -> None:
        if clock.monotonic() - self._complained.get(model, -math.inf) >= limits().gateway.count_complain_s:
            self._note(self._complained, model)
            logger.warning("count.tokenizer_unusable model=%s reason=%s", model, reason)

    @staticmethod
    def _note(times: dict[str, float], name: str) -> None:
        if len(times) >= limits().gateway.count_complaints:
            times.clear()
        times[name] = clock.monotonic()

    async def _ask_nodes(self, model: str, chat: bytes, tenant: str, request_id: str) -> Count | None:
        limit_s = limits().gateway.count_node_ms / 1000
        ends_at = clock.monotonic() + limit_s
        try:
            async with asyncio.timeout(limit_s), self._asking:
                for link in find_counting(self._registry, model)[: limits().gateway.count_nodes]:
                    left_ms = max(1, int((ends_at - clock.monotonic()) * 1000))
                    tokens = await ask_node(
                        link, model=model, body=chat, tenant=tenant, request_id=request_id, deadline_ms=left_ms
                    )
                    if tokens is not None:
                        return Count(tokens, Source.ENGINE, node=link.node_name)
        except TimeoutError:
            logger.info("count.nodes_silent model=%s", model)
        return None


async def run_beside(size_bytes: int, work: Callable[[], T]) -> T:
    # In a thread, so that the event loop gets its turn.
    return await asyncio.to_thread(work) if size_bytes > limits().gateway.count_large_bytes else work()
