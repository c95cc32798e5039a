"""``python -m tests.rings.fuzz``: an installation under fire for as long as it is told to, and a table of what came of it.

The exit status is 1 when anything was found, and 2 when the installation did not start.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import redis

from tests.fakes.broken_http import KINDS as BROKEN
from tests.fakes.engine_streams import FLOODS
from tests.fakes.http_client import call
from tests.fakes.lab import ACTOR, Lab, unique
from tests.fakes.queue_noise import QUEUES, send_noise
from tests.fakes.request_bodies import COUNT_MESSAGES, COUNT_RESPONSES, TRANSLATED, list_kinds
from tests.fakes.stack import Stack
from tests.fakes.waiting import eventually
from tests.rings.fuzz.document import Attack
from tests.rings.fuzz.rounds import SETTINGS, Fuzzer, fuzz

_BODIES, _ANSWERS, _EXAMPLES, _LARGE_BYTES = 200, 100, 4, 100 * 2**20
_SEEDS_A_ROUND = 1000
_SHOWN = 20
UNREADABLE = "muster_messages_unreadable_total"


@dataclass
class Tally:
    """What came of one kind of torment, over all rounds. ``cpu_s``: of the gateway's event loop."""

    statuses: Counter[int] = field(default_factory=Counter)
    cpu_s: float = 0.0
    wall_s: float = 0.0
    findings: int = 0
    rss_bytes: int = 0

    @property
    def sent(self) -> int:
        """How many requests there were."""
        return self.statuses.total()


@dataclass
class Torment:
    """One installation under fire: rounds of everything, one kind after the other, until time is up."""

    fuzzer: Fuzzer
    seed: int
    until: float
    tallies: dict[str, Tally] = field(default_factory=dict)
    rounds: int = 0

    async def run(self, tell: Callable[[str], None]) -> None:
        """Go on until the time is up; a kind that has begun is brought to its end. ``tell`` is told of each."""
        while time.monotonic() < self.until:
            first = self.seed + self.rounds * _SEEDS_A_ROUND
            for kind, torment in self._list_kinds(first):
                if time.monotonic() >= self.until:
                    return
                await self._measure(kind, torment)
                tell(kind)
            self.rounds += 1

    def _list_kinds(self, first: int) -> Iterator[tuple[str, Callable[[], Awaitable[object]]]]:
        """Yield every kind by name. ``first``: the first seed of the round."""
        fuzzer = self.fuzzer
        yield "malformed requests", self._send_malformed
        yield "spoilt bodies", lambda: fuzzer.send_spoilt(range(first, first + _BODIES))
        yield "broken HTTP", self._send_broken
        yield "bodies too large", self._send_large
        yield "bodies nobody wants", lambda: fuzzer.send_unread(_LARGE_BYTES)
        yield "spoilt streams", lambda: fuzzer.hear_spoilt(range(first, first + _ANSWERS))
        yield "spoilt answers", lambda: fuzzer.hear_answers(range(first, first + _ANSWERS))
        yield "the document", lambda: self._attack(first)
        name = list(FLOODS)[self.rounds % len(FLOODS)]
        yield "floods", lambda: fuzzer.hear_flood(name, list(FLOODS[name]()))

    async def _measure(self, kind: str, torment: Callable[[], Awaitable[object]]) -> None:
        tally = self.tallies.setdefault(kind, Tally())
        fuzzer = self.fuzzer
        statuses, found = Counter(fuzzer.statuses), len(fuzzer.findings)
        cpu_s, began = fuzzer.gauge.read_cpu_s(), time.monotonic()
        try:
            await torment()
        except AssertionError as fault:  # no answer at all: the rest of the kind has no use, the other kinds have
            fuzzer.findings.append(f"{kind}: {fault}")
        tally.statuses += fuzzer.statuses - statuses
        tally.cpu_s += fuzzer.gauge.read_cpu_s() - cpu_s
        tally.wall_s += time.monotonic() - began
        tally.findings += len(fuzzer.findings) - found
        tally.rss_bytes = fuzzer.gauge.read_rss_bytes()

    async def _send_malformed(self) -> None:
        for name, path, make in list_kinds():
            await self.fuzzer.send_malformed(name, path, make, repeats=1)

    async def _send_broken(self) -> None:
        for name in BROKEN:
            await self.fuzzer.send_broken(name)

    async def _send_large(self) -> None:
        await self.fuzzer.send_large(_LARGE_BYTES, declared=True)
        await self.fuzzer.send_large(_LARGE_BYTES, declared=False)

    async def _attack(self, first: int) -> None:
        fuzzer = self.fuzzer
        url, key = fuzzer.gateway.url, fuzzer.lab.stack.ready.api_key
        document = (await call("GET", url + "/openapi.json")).json
        for model, paths in ((fuzzer.native, set[str]()), (fuzzer.translated, {*TRANSLATED, COUNT_MESSAGES, COUNT_RESPONSES})):
            attack = Attack(document, url, model, key, examples=_EXAMPLES, first=first)
            await asyncio.to_thread(attack.run, paths)
            fuzzer.statuses += attack.statuses
            fuzzer.findings += attack.findings


def render_table(torment: Torment) -> str:
    """Return what was sent, what came back, and what it cost, a line for each kind."""
    lines = [
        f"{'kind':<20} {'sent':>8} {'CPU ms each':>11} {'MB after':>8} {'found':>5}  statuses (0 = closed without an answer)"
    ]
    for kind, tally in torment.tallies.items():
        statuses = " ".join(f"{status}:{count}" for status, count in sorted(tally.statuses.items()))
        each = tally.cpu_s * 1000 / max(1, tally.sent)
        lines.append(f"{kind:<20} {tally.sent:>8} {each:>11.2f} {tally.rss_bytes >> 20:>8} {tally.findings:>5}  {statuses}")
    return "\n".join(lines)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.rings.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to go on (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="the first seed: the same one sends the same (default: %(default)s)"
    )
    parser.add_argument("--messages", type=int, help="send so many messages to Valkey instead, and end with that")
    parser.add_argument("--base", type=Path, help="a new folder for the installation and its logs, which stays afterwards")
    return parser.parse_args(words)


@contextmanager
def run_installation(base: Path | None) -> Iterator[Stack]:
    """Run an installation in ``base``, None = in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="muster-fuzz-") as temporary:
        directory = base if base is not None else Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o755)  # as root, PostgreSQL runs as another user
        stack = Stack.start(directory.resolve(), settings={})
        try:
            yield stack
        finally:
            stack.stop()


async def send_messages(stack: Stack, arguments: argparse.Namespace) -> bool:
    """Send noise to Valkey, say what became of the processes that read it, and use the installation; True = all is well."""
    parts = {name: stack.part(f"controlplane.serve_{name}") for name in ("gateway", "worker", "control")}
    began = time.monotonic()
    with redis.Redis.from_url(stack.ready.redis_url) as client:
        taken = await asyncio.to_thread(send_noise, client, arguments.messages, seed=arguments.seed)
        client.delete(*(key for key in QUEUES if client.type(key) != b"list"))
        await eventually(partial(_is_read, client), what="the worker has read its lists", within_s=300)
    ended = [name for name, process in parts.items() if not process.is_running()]
    metrics = (await call("GET", stack.ready.gateway_url + "/metrics")).body.decode()
    counted = next((line.split()[1] for line in metrics.splitlines() if line.startswith(UNREADABLE + " ")), "0")
    _, key = stack.backstage.call("gateway.services.create_api_key", name=unique("k"), tenant_name="default", actor=ACTOR)
    good = await call("GET", stack.ready.gateway_url + "/v1/models", headers={"authorization": f"Bearer {key}"})
    health = await call("GET", stack.ready.control_url + "/healthz")
    print(
        f"{taken} of {arguments.messages} messages taken by Valkey, {time.monotonic() - began:.0f} s;"
        f" processes ended: {len(ended)} {ended or ''}; unreadable for the gateway: {float(counted):.0f};"
        f" a new key: {good.status}; health of the control plane: {health.status}"
    )
    return not ended and float(counted) > 0 and good.status == health.status == 200


async def _is_read(client: redis.Redis) -> bool:
    return not any(client.exists(key) for key in QUEUES)


async def torment(stack: Stack, arguments: argparse.Namespace) -> bool:
    """Run for the time that is asked for, print a line behind each kind and a table at the end; True = nothing was found."""
    _, secret = stack.backstage.call(
        "nodes.services.create_credential", name=unique("fuzz"), provider_name="local", max_nodes=10, actor=ACTOR
    )
    gateway = stack.gateway("fuzzed", SETTINGS)
    lab = Lab(stack, str(secret), gateway)
    try:
        async with fuzz(lab, gateway) as fuzzer:
            began, total_s = time.monotonic(), arguments.minutes * 60
            running = Torment(fuzzer, arguments.seed, began + total_s)
            rss = fuzzer.gauge.read_rss_bytes()

            def tell(kind: str) -> None:
                spent = min(total_s, time.monotonic() - began)
                print(
                    f"{spent * 100 / total_s:5.1f} %  {total_s - spent:5.0f} s to go  round {running.rounds + 1}  {kind}:"
                    f" {running.tallies[kind].sent} sent, {len(fuzzer.findings)} found,"
                    f" {fuzzer.gauge.read_rss_bytes() >> 20} MB",
                    flush=True,
                )

            await running.run(tell)
            bugs = fuzzer.read_bugs()
            print(f"\n{render_table(running)}\n")
            for finding in fuzzer.findings[:_SHOWN]:
                print(f"FOUND {finding}\n")
            if bugs:
                print(f"FOUND in the gateway's log:\n{bugs}\n")
            sent = sum(tally.sent for tally in running.tallies.values())
            print(
                f"{sent} requests in {running.rounds} whole rounds, {time.monotonic() - began:.0f} s;"
                f" memory {rss >> 20} MB at first, {fuzzer.gauge.read_rss_bytes() >> 20} MB at last;"
                f" {len(fuzzer.findings) + bool(bugs)} findings"
            )
            return not fuzzer.findings and not bugs
    finally:
        await lab.close()


def main() -> int:
    """Return the exit status."""
    arguments = parse_arguments()
    try:
        with run_installation(arguments.base) as stack:
            work = send_messages if arguments.messages else torment
            return 0 if asyncio.run(work(stack, arguments)) else 1
    except AssertionError as fault:
        print(fault, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
