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
from functools import partial
from pathlib import Path

import redis

from tests.fakes.engine_streams import FLOODS
from tests.fakes.http_client import call
from tests.fakes.lab import ACTOR, Lab, unique
from tests.fakes.queue_noise import QUEUES, send_noise
from tests.fakes.request_bodies import COUNT_MESSAGES, COUNT_RESPONSES, TRANSLATED, list_kinds
from tests.fakes.request_bodies import KINDS as BROKEN
from tests.fakes.stack import Stack
from tests.fakes.waiting import eventually
from tests.rings.fuzz.rounds import SETTINGS, Attack, Cost, Fuzzer, fuzz

_BODIES, _ANSWERS, _EXAMPLES, _LARGE_BYTES = 200, 100, 4, 100 * 2**20
_SEEDS_A_ROUND, _SHOWN = 1000, 20
UNREADABLE = "muster_messages_unreadable_total"
Torment = Callable[[], Awaitable[object]]


def list_torments(fuzzer: Fuzzer, seed: int) -> Iterator[tuple[str, Torment]]:
    """Yield every kind of torment by name, round after round. ``seed``: the first of the first round."""
    rounds = 0
    while True:
        first, flood = seed + rounds * _SEEDS_A_ROUND, list(FLOODS)[rounds % len(FLOODS)]
        for name, path, make in list_kinds():
            yield "malformed requests", partial(fuzzer.send_malformed, name, path, make, repeats=1)
        yield "spoilt bodies", partial(fuzzer.send_spoilt, range(first, first + _BODIES))
        for name in BROKEN:
            yield "broken HTTP", partial(fuzzer.send_broken, name)
        for declared in (True, False):
            yield "bodies too large", partial(fuzzer.send_large, _LARGE_BYTES, declared=declared)
        yield "bodies nobody wants", partial(fuzzer.send_unread, _LARGE_BYTES)
        yield "spoilt streams", partial(fuzzer.hear_spoilt, range(first, first + _ANSWERS))
        yield "spoilt answers", partial(fuzzer.hear_answers, range(first, first + _ANSWERS))
        yield "the document", partial(attack, fuzzer, first)
        yield "floods", partial(fuzzer.hear_flood, flood, list(FLOODS[flood]()))
        rounds += 1


async def attack(fuzzer: Fuzzer, first: int) -> None:
    """Send good and bad data made from the document."""
    url, key = fuzzer.gateway.url, fuzzer.lab.stack.ready.api_key
    document = (await call("GET", url + "/openapi.json")).json
    for model, paths in ((fuzzer.native, set[str]()), (fuzzer.translated, {*TRANSLATED, COUNT_MESSAGES, COUNT_RESPONSES})):
        sent = Attack(document, url, model, key, examples=_EXAMPLES, first=first)
        await asyncio.to_thread(sent.run, paths)
        fuzzer.statuses += sent.statuses
        fuzzer.findings += sent.findings


async def torment(stack: Stack, arguments: argparse.Namespace) -> bool:
    """Run for the time that is asked for and print a table at the end; True = nothing was found."""
    wanted = {"name": unique("fuzz"), "provider_name": "local", "max_nodes": 10, "actor": ACTOR}
    _, secret = stack.backstage.call("nodes.services.create_credential", **wanted)
    gateway = stack.gateway("fuzzed", SETTINGS)
    lab, until = Lab(stack, str(secret), gateway), time.monotonic() + arguments.minutes * 60
    sent, found, cpu_ms = dict[str, Counter[int]](), Counter[str](), Counter[str]()
    try:
        async with fuzz(lab, gateway) as fuzzer:
            rss = fuzzer.gauge.read_rss_bytes()
            for kind, work in list_torments(fuzzer, arguments.seed):
                if time.monotonic() >= until:
                    break
                before, known, cost = Counter(fuzzer.statuses), len(fuzzer.findings), Cost(fuzzer.gauge)
                try:
                    await work()
                except AssertionError as fault:  # no answer at all: the other kinds have their turn
                    fuzzer.findings.append(f"{kind}: {fault}")
                sent.setdefault(kind, Counter()).update(fuzzer.statuses - before)
                found[kind] += len(fuzzer.findings) - known
                cpu_ms[kind] += int(cost.stop().cpu_ms)
            bugs = fuzzer.read_bugs()
            print(f"{'kind':<20} {'sent':>8} {'CPU ms each':>11} {'found':>5}  statuses (0 = closed without an answer)")
            for kind, counts in sent.items():
                statuses = " ".join(f"{status}:{count}" for status, count in sorted(counts.items()))
                each = cpu_ms[kind] / max(1, counts.total())
                print(f"{kind:<20} {counts.total():>8} {each:>11.2f} {found[kind]:>5}  {statuses}")
            for finding in [*fuzzer.findings[:_SHOWN], *([f"in the gateway's log:\n{bugs}"] if bugs else [])]:
                print(f"FOUND {finding}\n")
            print(f"memory {rss >> 20} MB at first, {fuzzer.gauge.read_rss_bytes() >> 20} MB at last")
            return not fuzzer.findings and not bugs
    finally:
        await lab.close()


async def send_messages(stack: Stack, arguments: argparse.Namespace) -> bool:
    """Send noise to Valkey, say what became of the processes that read it, and use the installation; True = all is well."""
    parts = {name: stack.part(f"controlplane.serve_{name}") for name in ("gateway", "worker", "control")}
    with redis.Redis.from_url(stack.ready.redis_url) as client:
        taken = await asyncio.to_thread(send_noise, client, arguments.messages, seed=arguments.seed)
        client.delete(*(key for key in QUEUES if client.type(key) != b"list"))
        await eventually(lambda: not any(client.exists(key) for key in QUEUES), "the worker has read its lists", within_s=300)
    ended = [name for name, process in parts.items() if not process.is_running()]
    metrics = (await call("GET", stack.ready.gateway_url + "/metrics")).body.decode()
    counted = float(next((line.split()[1] for line in metrics.splitlines() if line.startswith(UNREADABLE + " ")), "0"))
    _, key = stack.backstage.call("gateway.services.create_api_key", name=unique("k"), tenant_name="default", actor=ACTOR)
    good = await call("GET", stack.ready.gateway_url + "/v1/models", headers={"authorization": f"Bearer {key}"})
    health = await call("GET", stack.ready.control_url + "/healthz")
    print(
        f"{taken} of {arguments.messages} messages taken by Valkey; processes ended: {len(ended)} {ended or ''}; unreadable for"
        f" the gateway: {counted:.0f}; a new key: {good.status}; health of the control plane: {health.status}"
    )
    return not ended and counted > 0 and good.status == health.status == 200


def main() -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.rings.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to go on (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the same sends the same (default: %(default)s)")
    parser.add_argument("--messages", type=int, help="send so many messages to Valkey instead, and end with that")
    parser.add_argument("--base", type=Path, help="a new folder for the installation and its logs, which stays afterwards")
    arguments = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="muster-fuzz-") as temporary:
            directory = arguments.base or Path(temporary)
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o755)  # as root, PostgreSQL runs as another user
            stack = Stack.start(directory.resolve(), settings={})
            try:
                return 0 if asyncio.run((send_messages if arguments.messages else torment)(stack, arguments)) else 1
            finally:
                stack.stop()
    except AssertionError as fault:
        print(fault, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
