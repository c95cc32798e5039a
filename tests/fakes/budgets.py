"""The dealers of budgets in memory: Valkey by the rule that PostgreSQL deals by, and PostgreSQL's table itself.

``tests/system/gateway/test_budgets.py`` holds the rule beside Valkey's real script.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import msgspec
import redis.exceptions

from gateway.request import budgets
from gateway.services import shares
from gateway.services.shares import Answer, Claim, Order, State
from wire import clock

_claims = msgspec.json.Decoder(list[Claim])


class MemoryTerms:
    """What ``DealerTable`` keeps in PostgreSQL."""

    def __init__(self) -> None:
        self.epoch: State = {}
        self.counters: dict[str, State] = {}

    def read_term(self) -> tuple[int, bool]:
        return int(self.epoch.get("term", 0)), bool(self.epoch) and "closed" not in self.epoch

    def deal(self, order: Order, *, now: int, reaches: bool, living: Collection[str]) -> Answer:
        return shares.deal_in_term(self.epoch, self.counters, order, now=now, reaches=reaches, living=living)

    def begin(self, *, epoch_id: str, name: str, base: int) -> None:
        shares.begin(self.epoch, self.counters.setdefault(name, {}), epoch_id=epoch_id, base=base)

    def absorb(self, *, epoch_id: str, name: str, gateway: str, used: int) -> None:
        shares.absorb(self.epoch, self.counters.setdefault(name, {}), epoch_id=epoch_id, gateway=gateway, used=used)

    def list_joined(self) -> list[str]:
        return shares.list_joined(self.epoch)


class MemoryValkey:
    """A Valkey that knows the scripts of budgets and nothing else. ``takes_s``: how long a command takes, None = no time."""

    def __init__(self, *, run: str = "", takes_s: float | None = None) -> None:
        self.epoch: State = {}
        self.counters: dict[str, State] = {}
        self.run, self.takes_s, self.is_away = run, takes_s, False

    async def eval(self, script: str, _numkeys: int, *words: str) -> Any:  # Any: as in redis-py
        await self._take_time()
        if script == budgets._DEAL:
            return self._deal(words)
        if script == budgets._BEGIN:
            _epoch, name, epoch_id, base = words
            shares.begin(self.epoch, self.counters.setdefault(name, {}), epoch_id=epoch_id, base=int(base))
        elif script == budgets._ABSORB:
            _epoch, name, epoch_id, gateway, used = words
            counter = self.counters.setdefault(name, {})
            shares.absorb(self.epoch, counter, epoch_id=epoch_id, gateway=gateway, used=int(used))
        return 0

    async def hkeys(self, _name: str) -> list[bytes]:
        await self._take_time()
        return [name.encode() for name in self.epoch]

    async def _take_time(self) -> None:
        if self.takes_s is not None:
            await asyncio.sleep(self.takes_s)
        if self.is_away:
            raise redis.exceptions.ConnectionError("Valkey is away")

    def _deal(self, words: tuple[str, ...]) -> list[Any]:
        _epoch, *names, gateway, new_id, known_id, says, parts, number, term, claims = words
        order = Order(
            gateway=gateway, new_id=new_id, known_id=known_id, says=int(says), parts=float(parts), number=int(number),
            term=int(term), claims=dict(zip(names, _claims.decode(claims), strict=True)),
        )  # fmt: skip
        return write_answer(shares.deal(self.epoch, self.counters, order, now=int(clock.unix_s()), run=self.run))


def write_answer(answer: Answer) -> list[Any]:
    """Return an answer as Valkey's script says it."""
    said: list[Any] = [answer.epoch.encode(), str(answer.term).encode()]
    if answer.holdings is not None:
        said.append([
            [
                str(one.held).encode(), str(one.possible).encode(), b"%d" % one.is_begun, b"%d" % one.is_wanted,
                " ".join(one.others).encode(),
            ]
            for one in answer.holdings
        ])  # fmt: skip
        said.append(b"%d" % answer.is_wanted)
    return said
