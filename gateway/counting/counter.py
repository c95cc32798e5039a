"""Chooses who counts: a registered tokenizer, else a box, else nobody, and then it is estimated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from core.limits import limits
from gateway.counting.boxes import ask_box, find_counting
from gateway.counting.values import Count, Source, UnusableFolder, estimate_tokens, read_prompt
from gateway.values import ModelEntry
from nodes.links import LinkRegistry
from wire import clock

if TYPE_CHECKING:
    from gateway.counting.folders import TokenizerFolders

logger = logging.getLogger("muster.gateway")

T = TypeVar("T")


class TokenCounter:
    """Counts prompts of chat completions. ``root``: where tokenizers lie, None = nowhere."""

    def __init__(self, registry: LinkRegistry, root: Path | None) -> None:
        self._registry = registry
        self._folders = _open_folders(root) if root is not None else None
        self._threads = ThreadPoolExecutor(limits().gateway.count_threads, thread_name_prefix="count")
        self._busy = 0
        self._asking = asyncio.Semaphore(limits().gateway.count_asked)
        self._complained: dict[str, float] = {}

    async def count(self, entry: ModelEntry, chat: bytes, *, tenant: str, request_id: str) -> Count:
        """Return how many tokens the prompt of a chat completion has; ``chat`` is its body, for that model."""
        if len(chat) <= limits().gateway.count_body_bytes:
            found = await self._ask_tokenizer(entry, chat)
            if found is None:
                found = await self._ask_boxes(entry.name, chat, tenant, request_id)
            if found is not None:
                return found
        tokens = await run_beside(len(chat), lambda: estimate_tokens(read_prompt(chat)))
        return Count(tokens, Source.ESTIMATE, is_estimated=True)

    async def _ask_tokenizer(self, entry: ModelEntry, chat: bytes) -> Count | None:
        """Count in a thread. What cannot be counted so in time is None; its thread is not waited for, but counted as busy."""
        folders, name = self._folders, entry.tokenizer
        if folders is None or not name or self._busy >= limits().gateway.count_threads + limits().gateway.count_waiting:
            return None
        self._busy += 1
        job = asyncio.get_running_loop().run_in_executor(self._threads, lambda: folders.get(name).count(read_prompt(chat)))
        job.add_done_callback(lambda done: self._take_end(entry.name, done))
        await asyncio.wait({job}, timeout=limits().gateway.count_thread_s)
        # Whatever a foreign library raised is an outcome here: there are two more ways to a number.
        if not job.done() or job.cancelled() or job.exception() is not None:
            return None
        counted = job.result()
        return Count(counted[0], Source.TOKENIZER, is_estimated=counted[1]) if counted is not None else None

    def _take_end(self, model: str, job: asyncio.Future[tuple[int, bool] | None]) -> None:
        self._busy -= 1
        error = None if job.cancelled() else job.exception()
        if error is not None:
            self._complain(model, str(error) if isinstance(error, UnusableFolder) else type(error).__name__)

    def _complain(self, model: str, reason: str) -> None:
        """Log why a model's tokenizer is of no use, now and then."""
        now = clock.monotonic()
        every_s = limits().gateway.count_complain_s
        if now - self._complained.get(model, -every_s) < every_s:
            return
        if len(self._complained) >= limits().gateway.count_complaints:
            self._complained.clear()
        self._complained[model] = now
        logger.warning("count.tokenizer_unusable model=%s reason=%s", model, reason)

    async def _ask_boxes(self, model: str, chat: bytes, tenant: str, request_id: str) -> Count | None:
        limit_s = limits().gateway.count_node_ms / 1000
        ends_at = clock.monotonic() + limit_s
        try:
            async with asyncio.timeout(limit_s), self._asking:
                for link in find_counting(self._registry, model)[: limits().gateway.count_nodes]:
                    left_ms = max(1, int((ends_at - clock.monotonic()) * 1000))
                    tokens = await ask_box(
                        link, model=model, body=chat, tenant=tenant, request_id=request_id, deadline_ms=left_ms
                    )
                    if tokens is not None:
                        return Count(tokens, Source.ENGINE, node=link.node_name)
        except TimeoutError:
            logger.info("count.boxes_silent model=%s", model)
        return None


def _open_folders(root: Path) -> TokenizerFolders:
    from gateway.counting.folders import TokenizerFolders  # loads a template engine, which few gateways need

    return TokenizerFolders(root)


async def run_beside(size_bytes: int, work: Callable[[], T]) -> T:
    """Return what ``work`` returns; a large body is worked on in a thread, so that the event loop gets its turn."""
    return await asyncio.to_thread(work) if size_bytes > limits().gateway.count_large_bytes else work()
