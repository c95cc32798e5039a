"""The slots of a llama.cpp server: which one a call goes to, so that no tenant reuses what another left there, and their flush.

llama.cpp reuses whatever prompt its slot held before when a call says ``cache_prompt``. So a call may say that only in a
slot whose content is known to be its own; everywhere else it starts from nothing. A server that others started is tried
first, since by default it keeps a second copy of prompts in host memory, which crosses slots, and says so nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import urlencode

import msgspec

from runner.engines.http import HttpServer, read_answer
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
    CacheMode,
    Call,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    FlushScope,
    Response,
)
from runner.errors import EngineError
from runner.limits import limits
from wire import clock
from wire.traces import TRACE_HEADERS
from wire.unreadable import UNREADABLE

# ---- whose a slot is ----


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose prompt a slot holds: the scope in which cache entries are shared."""

    tenant: str
    tag: str


Prompt = tuple[int, ...]
"""Hashes of the blocks of a prompt, each covering all before it: equal ones mean equal beginnings."""


def cut_prompt(body: bytes) -> Prompt:
    """Return the blocks of a request's body; of a short one there are none."""
    size, covered, prompt = limits().engines.llama_prompt_block_bytes, 0, []
    for end in range(size, min(len(body), size * limits().engines.llama_prompt_blocks) + 1, size):
        covered = hash((covered, body[end - size : end]))
        prompt.append(covered)
    return tuple(prompt)


@dataclass(frozen=True, slots=True)
class Lease:
    """One call's slot. ``owner`` is whose the content will be, None = nobody's. ``reuses``: what is there is its own.

    A lease that is not ``is_pinned`` only holds a place: the engine chooses the slot itself. ``prompt``: what it will hold
    (``cut_prompt``).
    """

    slot: int
    owner: Owner | None
    reuses: bool = False
    is_pinned: bool = True
    prompt: Prompt = ()


@dataclass(slots=True)
class _Slot:
    index: int
    owner: Owner | None = None
    is_blank: bool = True
    lease: Lease | None = None
    last_used: int = 0
    prompt: Prompt = ()

    def count_common(self, prompt: Prompt) -> int:
        """Return how many blocks of a prompt it holds, from the beginning."""
        pairs = enumerate(zip(self.prompt, prompt, strict=False))
        return next((number for number, (one, other) in pairs if one != other), min(len(self.prompt), len(prompt)))

    def fits(self, prompt: Prompt) -> bool:
        """Whether no more than half of what it holds is lost to a prompt."""
        return 2 * self.count_common(prompt) >= len(self.prompt)


class SlotTable:
    """Which of ``count`` slots is whose and which are in use. Every method is one synchronous decision."""

    def __init__(self, count: int) -> None:
        self._slots = [_Slot(index) for index in range(count)]
        self._clock = 0
        self._unpinned = 0

    def take(self, owner: Owner, cache_mode: CacheMode, prompt: Prompt = ()) -> Lease | None:
        """Return a slot for a call, None when all are in use.

        Its own slot that holds most of its prompt first, else an empty one, else its own that is unused for longest, else one
        that is nobody's, else anybody's that is unused for longest.
        """
        free = self._free()
        # A call that is to leave nothing spares its tenant's own slots as it would anybody's.
        own = [slot for slot in free if slot.owner == owner and cache_mode != "none"]
        if own:
            fitting = [slot for slot in own if slot.fits(prompt)]
            if fitting:
                slot = max(fitting, key=lambda slot: (slot.count_common(prompt), slot.last_used))
                return self._hold(slot, Lease(slot.index, owner, reuses=True, prompt=prompt))
            if not any(slot.is_blank for slot in free):
                slot = min(own, key=lambda slot: slot.last_used)
                return self._hold(slot, Lease(slot.index, owner, reuses=True, prompt=prompt))
        if not free:
            return None
        slot = min(free, key=lambda slot: (not slot.is_blank, slot.owner is not None, slot.last_used))
        if cache_mode == "none":
            return self._hold(slot, Lease(slot.index, None))
        return self._hold(slot, Lease(slot.index, owner, prompt=prompt))

    def take_unpinned(self) -> Lease | None:
        """Return a place for a call that the engine puts where it likes, None when all are in use."""
        free = self._free()
        if not free:
            return None
        # It may run in any of them, so from now until it ends nothing is known of a slot that is free meanwhile.
        for slot in free:
            slot.owner, slot.is_blank = None, False
        self._unpinned += 1
        slot = min(free, key=lambda slot: slot.last_used)  # the engine's own rule, so most likely the right guess
        return self._hold(slot, Lease(slot.index, None, is_pinned=False))

    def release(self, lease: Lease, *, was_answered: bool) -> None:
        slot = self._slots[lease.slot]
        slot.lease = None
        slot.is_blank = False
        self._clock += 1
        slot.last_used = self._clock
        # Only an answer proves that its prompt has replaced what the slot held before.
        is_known = (was_answered or lease.reuses) and lease.is_pinned and not self._unpinned
        slot.owner, slot.prompt = (lease.owner, lease.prompt) if is_known else (None, ())
        if not lease.is_pinned:
            self._unpinned -= 1

    def seize(self, request: FlushRequest) -> list[Lease] | None:
        """Take every slot that may hold what is to be flushed; None when one of them is in use, and then none is taken."""
        if self._unpinned:
            return None
        wanted = [slot for slot in self._slots if _may_hold(slot, request)]
        if any(slot.lease is not None for slot in wanted):
            return None
        return [self._hold(slot, Lease(slot.index, None)) for slot in wanted]

    def return_seized(self, leases: list[Lease], *, erased: set[int]) -> None:
        """Give seized slots back; those in ``erased`` are empty now, the others stay whose they were."""
        for lease in leases:
            slot = self._slots[lease.slot]
            slot.lease = None
            if lease.slot in erased:
                slot.owner, slot.is_blank, slot.prompt = None, True, ()

    def _free(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.lease is None]

    @staticmethod
    def _hold(slot: _Slot, lease: Lease) -> Lease:
        slot.lease = lease
        return lease


def _may_hold(slot: _Slot, request: FlushRequest) -> bool:
    if request.scope in {FlushScope.ALL, FlushScope.MODEL}:
        return True
    owner = slot.lease.owner if slot.lease is not None else slot.owner
    if owner is None:
        return slot.lease is None and not slot.is_blank  # of a slot that is nobody's, nobody knows
    if request.tenant is not None and owner.tenant != request.tenant:
        return False
    return request.scope is FlushScope.TENANT or owner.tag == request.tag


# ---- the slots of a running server ----

# Not /v1/messages: llama.cpp drops unknown members of its body, so such a call runs in whatever slot it likes.
PINNABLE: Final = frozenset({CHAT, COMPLETIONS, RESPONSES})

# Everything else stays here: X-Conversation-Id, for one, makes llama.cpp go on generating when the client has left.
_TO_ENGINE: Final = (
    frozenset({"content-type", "accept", "anthropic-version", "anthropic-beta", "user-agent", "x-request-id"}) | TRACE_HEADERS
)
_METRIC: Final = re.compile(rb"^llamacpp:(\w+) ([0-9.eE+]+)$", re.MULTILINE)


class TemplateAbilities(msgspec.Struct, frozen=True):
    supports_tools: bool = False


class Modalities(msgspec.Struct, frozen=True):
    vision: bool = False
    audio: bool = False


class SlotSettings(msgspec.Struct, frozen=True):
    """What a request gets unless it says otherwise; ``n_ctx`` is the context of one slot."""

    n_ctx: int = 0


class Properties(msgspec.Struct):
    """The part of ``GET /props`` that tells what a model can do."""

    total_slots: int = 1
    default_generation_settings: SlotSettings = SlotSettings()
    chat_template_caps: TemplateAbilities = TemplateAbilities()
    modalities: Modalities = Modalities()
    build_info: str = ""

    @property
    def version(self) -> str:
        """The build, as in ``b6000-0123abc``; empty where the program was built without knowing it (``b0-unknown``)."""
        return "" if self.build_info.endswith("unknown") else self.build_info

    @property
    def context_tokens(self) -> int | None:
        return self.default_generation_settings.n_ctx or None


class _Object(msgspec.Struct):
    """Any JSON object."""


class Slot(msgspec.Struct):
    """What ``GET /slots`` says of one slot; a slot that was never used has no token count."""

    id: int
    n_ctx: int = 0
    is_processing: bool = False
    n_prompt_tokens: int = 0


_object_decoder = msgspec.json.Decoder(_Object)


def pin_body(body: bytes, lease: Lease) -> bytes:
    return end_with(body, b'"id_slot":%d,"cache_prompt":%b' % (lease.slot, b"true" if lease.reuses else b"false"))


def end_with(body: bytes, members: bytes) -> bytes:
    """Return the body, a JSON object, with further members at its end."""
    # llama.cpp goes by the last of equal members, so what the client says about them, however it spells it, does not count.
    start, end = body.index(b"{") + 1, body.rindex(b"}")
    comma = b"," if body[start:end].strip() else b""
    return b"%b%b%b}" % (body[:end], comma, members)


def is_object(body: bytes) -> bool:
    try:
        _object_decoder.decode(body)
    except UNREADABLE:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Findings:
    """``isolates``: a prompt stays in its slot and may be kept from being reused. ``erases``: an erased one is gone."""

    isolates: bool = False
    erases: bool = False
    detail: str = ""


class _Timings(msgspec.Struct):
    cache_n: int


class _Completion(msgspec.Struct):
    timings: _Timings


class LlamaSlots:
    """The slots of one running server. ``count``: how many it has. ``model``: whose, for a server that routes to several."""

    def __init__(self, server: HttpServer, count: int, *, model: str | None = None) -> None:
        self._server = server
        self._question = "" if model is None else "?" + urlencode({"model": model})
        self._routing = None if model is None else {"model": model}
        self._table = SlotTable(count)
        self.token_s: float | None = None
        """What a token of a prompt took on average, as the server itself counts; None = it has read none yet."""
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def send(self, call: Call) -> AsyncIterator[Response]:
        """Send a call that generates, in a slot of its tenant's; waits while all are in use.

        Raises aiohttp.ClientError, OSError.
        """
        # What is no object the engine will refuse itself, and says best why.
        is_pinnable = call.path.partition("?")[0] in PINNABLE and is_object(call.body)
        lease = await self._take(call, is_pinnable=is_pinnable)
        was_answered = False
        try:
            body = pin_body(call.body, lease) if lease.is_pinned else call.body
            async with self._server.send(plain_call(call), body=body) as response:
                was_answered = response.status == 200
                yield response
        finally:
            self._table.release(lease, was_answered=was_answered)
            self._freed.set()

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        seized = self._table.seize(request)
        if seized is None:
            return FlushOutcome(FlushResult.REFUSED_BUSY, "a request is running in a slot that was to be erased")
        erased: set[int] = set()
        try:
            return await self._erase([lease.slot for lease in seized], erased)
        finally:
            self._table.return_seized(seized, erased=erased)
            self._freed.set()

    async def read_properties(self) -> Properties:
        return await self._server.ask_for(f"/props{self._question}", Properties) or Properties()

    async def list_slots(self) -> list[Slot] | None:
        """Return the server's slots, None when it does not show them. Raises EngineError when it does not answer."""
        status, body = await self._server.ask("GET", f"/slots{self._question}")
        if status != 200:
            return None
        return read_answer(body, list[Slot], "/slots answers with something else than slots")

    async def ask_loop(self) -> None:
        # The server's loop answers this between two batches.
        with contextlib.suppress(EngineError):
            await self._server.ask("GET", f"/slots{self._question}", timeout_s=math.inf)

    async def read_stats(self) -> EngineStats:
        """Return what ``/slots`` and ``/metrics`` say. Raises EngineError when the server does not answer."""
        slots = await self.list_slots() or []
        status, body = await self._server.ask("GET", f"/metrics{self._question}")
        floats = {name.decode(): float(value) for name, value in _METRIC.findall(body)} if status == 200 else {}
        values = {name: int(value) for name, value in floats.items()}
        if values.get("prompt_tokens_total"):
            self.token_s = floats.get("prompt_seconds_total", 0.0) / values["prompt_tokens_total"]
        return EngineStats(
            running=values.get("requests_processing", sum(slot.is_processing for slot in slots) if slots else None),
            waiting=values.get("requests_deferred"),
            kv_total_tokens=sum(slot.n_ctx for slot in slots) if slots else None,
            kv_used_tokens=sum(min(slot.n_prompt_tokens, slot.n_ctx) for slot in slots) if slots else None,
        )

    async def probe(self) -> Findings:
        """Try slot 0 of an idle server that others started: what does it do with prompts?"""
        try:
            return await self._probe()
        except (EngineError, *UNREADABLE) as error:  # an answer that cannot be understood: nothing can be relied on
            return Findings(detail=f"what the server keeps of prompts could not be found out: {error}")

    async def _probe(self) -> Findings:
        first, second = secrets.token_hex(48), secrets.token_hex(48)
        await self._count_reused(first, may_reuse=True)
        if await self._count_reused(first, may_reuse=True) <= limits().engines.llama_probe_tokens:
            return Findings(detail="the server reports no reuse of prompts, so nothing can be said about it")
        if await self._count_reused(first, may_reuse=False):
            return Findings(detail="the server reuses prompts also where it is told not to")
        await self._count_reused(second, may_reuse=True)  # now a copy of the first would be in host memory
        if await self._count_reused(first, may_reuse=True) > limits().engines.llama_probe_tokens:
            return Findings(detail="the server keeps copies of prompts in host memory: start it with --cache-ram 0")
        if not await self._can_erase():
            return Findings(isolates=True, detail="the server does not erase slots: start it with --slot-save-path")
        if await self._count_reused(first, may_reuse=True):
            return Findings(isolates=True, detail="the server brings erased prompts back")
        await self._can_erase()
        return Findings(isolates=True, erases=True)

    async def _count_reused(self, prompt: str, *, may_reuse: bool) -> int:
        body = {**(self._routing or {}), "prompt": prompt, "n_predict": 1, "id_slot": 0, "cache_prompt": may_reuse}
        status, answer = await self._server.ask("POST", "/completion", body=body, timeout_s=limits().engines.llama_probe_s)
        if status != 200:
            raise EngineError(f"/completion answers HTTP {status}")
        return msgspec.json.decode(answer, type=_Completion).timings.cache_n

    async def _can_erase(self) -> bool:
        status, _ = await self._server.ask(
            "POST", "/slots/0?action=erase", body=self._routing, timeout_s=limits().engines.llama_probe_s
        )
        return status == 200

    async def _take(self, call: Call, *, is_pinnable: bool) -> Lease:
        prompt = cut_prompt(call.body) if is_pinnable else ()
        while True:
            if is_pinnable:
                lease = self._table.take(Owner(call.tenant, call.cache_tag), call.cache_mode, prompt)
            else:
                lease = self._table.take_unpinned()
            if lease is not None:
                return lease
            # All who wait look again, the oldest first: they are few, since the queue of the runner lets no more in than fit.
            self._freed.clear()
            await self._freed.wait()

    async def _erase(self, wanted: list[int], erased: set[int]) -> FlushOutcome:
        before = await self._when_idle(wanted)
        if before is None:
            return FlushOutcome(FlushResult.NOT_SUPPORTED, "the server does not show its slots: start it with --slots")
        if any(slot.is_processing for slot in before):
            return FlushOutcome(FlushResult.REFUSED_BUSY, "the engine is still working in a slot that was to be erased")
        for index in wanted:
            status, _ = await self._server.ask("POST", f"/slots/{index}?action=erase", body=self._routing)
            if status != 200:
                detail = f"the server refuses to erase a slot (HTTP {status}): start it with --slot-save-path"
                return FlushOutcome(FlushResult.NOT_SUPPORTED, detail)
            erased.add(index)
        # The server's word that it has erased is not enough.
        left = [slot.id for slot in _among(await self.list_slots() or [], wanted) if slot.n_prompt_tokens]
        erased.difference_update(left)
        if left:
            raise EngineError(f"slots {left} still hold a prompt after they were erased")
        removed = sum(slot.n_prompt_tokens > 0 for slot in before)
        return FlushOutcome(FlushResult.FLUSHED, "erased; the buffer itself stays allocated", removed, 0)

    async def _when_idle(self, wanted: list[int]) -> list[Slot] | None:
        # For a moment only: a client that left is let go of quickly.
        deadline = clock.monotonic() + limits().engines.llama_slots_s
        while True:
            shown = await self.list_slots()
            if shown is None:
                return None
            slots = _among(shown, wanted)
            if not any(slot.is_processing for slot in slots) or clock.monotonic() > deadline:
                return slots
            await asyncio.sleep(0.02)


def plain_call(call: Call) -> Call:
    return replace(call, headers={name: value for name, value in call.headers.items() if name.lower() in _TO_ENGINE})


def _among(slots: Iterable[Slot], wanted: list[int]) -> list[Slot]:
    return [slot for slot in slots if slot.id in wanted]
