"""``./muster bench placement``: what comes of the ways to choose a node, and what choosing costs.

./muster bench placement                   # all of it, about five minutes
./muster bench placement --only contests   # scripted nodes on a virtual clock: the same figures on every machine
./muster bench placement --only affinity   # CPU and memory of sessions and prompt beginnings
./muster bench placement --only chats      # conversations on four real nodes with llama.cpp
./muster bench placement --only presence   # what 10 and 1,000 nodes have written while nobody asks
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import django
import psycopg

from benchmarks.errors import BenchmarkError
from benchmarks.muster import Muster
from benchmarks.nginx import is_listening
from benchmarks.plan import System
from benchmarks.processes import Child, CorePlan, plan_cores
from benchmarks.storage import Storage, open_storage

PARTS = ("contests", "affinity", "chats", "presence")
MODEL = "muster-tiny"
NODES, SLOTS, LINES, TURNS, ANSWER_TOKENS, TURN_WORDS = 4, 4, 12, 8, 24, 32
_PAUSE_S = 0.3
_LEARN_S = 4.0
"""So long a gateway may take to learn of other weights."""
_READY_S, _ASK_S = 120.0, 60.0
_SETTLE_S, _WATCH_S = 15.0, 20.0
_LEAST_LOAD = {"load": 1.0, "active": 0.0, "latency": 0.0, "reliability": 0.0, "affinity": 0.0}
WAYS: dict[str, dict[str, float]] = {
    "score": {}, "score, affinity 0.5": {"affinity": 0.5}, "least load": _LEAST_LOAD, "round robin": _LEAST_LOAD,
}  # fmt: skip
"""By the weights of the model. In turn: each request names its node (``prefer_gpu``)."""


@dataclass
class Counts:
    """What came of some conversations. ``first_ms``: to the first token."""

    prompt: int = 0
    cached: int = 0
    first_ms: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        cuts = quantiles(self.first_ms, n=20)
        return (
            f"{self.cached / self.prompt:.0%} of {self.prompt:,} prompt tokens reused, "
            f"first token p50 {cuts[9]:.0f} ms, p95 {cuts[18]:.0f} ms"
        )


class Chats(Muster):
    """A gateway and four nodes that have the tiny model with llama.cpp."""

    def _start(self) -> None:
        self._run_step("migrate", ["manage.py", "migrate", "--no-input", "-v", "0"])
        prepared: dict[str, str] = json.loads(self._run_step("provision", ["-m", "benchmarks.provision", "1", MODEL]))
        self.key = prepared["api_key"]
        self._start_gateway()
        self.gateway.wait_until(lambda: is_listening(self.port), "the gateway was to listen", _READY_S)
        argv = [sys.executable, "-m", "runner", "--gateway", f"http://127.0.0.1:{self.port}", "--threads", "1"]
        argv += ["--max-concurrent", str(SLOTS), "--log-level", "warning"]
        env = {**self._env, "MUSTER_TOKEN": prepared["relay_secret"]}
        for number in range(NODES):
            named = [*argv, "--name", f"n{number}", "--data", str(self._work_dir / f"n{number}")]
            child = Child(f"n{number}", named, log_dir=self._work_dir, cores=self._cores.around, env=env)
            self._children.append(child)

    def weigh(self, weights: dict[str, float]) -> None:
        """Give the model weights of its own."""
        code = (
            "import django; django.setup(); from gateway.services.models import change_model_weights; "
            f"change_model_weights(name={MODEL!r}, weights={weights!r}, actor='benchmark')"
        )
        self._run_step("weigh", ["-c", code])
        time.sleep(_LEARN_S)

    async def ask(self, messages: list[dict[str, str]], counts: Counts, *, node: str = "") -> str:
        """Ask for a stream, and return its text. Raises BenchmarkError."""
        body: dict[str, Any] = {  # Any: JSON
            "model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if node:
            body["x_pool_options"] = {"prefer_gpu": node}
        content = json.dumps(body).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1", "host: localhost", "connection: close", "content-type: application/json",
            f"authorization: Bearer {self.key}", f"content-length: {len(content)}",
        )  # fmt: skip
        began, first_s, answer = time.monotonic(), 0.0, b""
        try:
            async with asyncio.timeout(_ASK_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                try:
                    writer.write("\r\n".join([*head, "", ""]).encode() + content)
                    while data := await reader.read(65536):
                        answer += data
                        if not first_s and b'"content":"' in answer:
                            first_s = time.monotonic() - began
                finally:
                    writer.close()
        except OSError as error:  # a timeout is one
            raise BenchmarkError(f"a request ended with {error!r}") from error
        return _read_stream(answer, counts, first_s)


def _read_stream(answer: bytes, counts: Counts, first_s: float) -> str:
    events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
    usage = next((event["usage"] for event in reversed(events) if event.get("usage")), None)
    if usage is None or not first_s:
        raise BenchmarkError(f"an answer was not whole: {answer[-400:]!r}")
    counts.prompt += usage["prompt_tokens"]
    counts.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    counts.first_ms.append(first_s * 1000)
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event.get("choices", ()))


async def talk(chats: Chats, way: str, seed: int) -> Counts:
    """Have conversations, all at a time, each turn sent with all before it."""
    counts, turn = Counts(), 0

    async def converse(number: int) -> None:
        nonlocal turn
        draw = random.Random(f"{way} {seed} {number}")
        messages = [{"role": "system", "content": _say(draw, TURN_WORDS)}]
        for _ in range(TURNS):
            messages.append({"role": "user", "content": _say(draw, TURN_WORDS)})
            turn += 1
            said = await chats.ask(messages, counts, node=f"n{turn % NODES}" if way == "round robin" else "")
            messages.append({"role": "assistant", "content": said})
            await asyncio.sleep(_PAUSE_S)

    await asyncio.gather(*(converse(number) for number in range(LINES)))
    return counts


def _say(draw: random.Random, words: int) -> str:
    return " ".join(f"{draw.randrange(1 << 20):05x}" for _ in range(words))


async def _wait_for_nodes(chats: Chats) -> None:
    deadline, ready = time.monotonic() + _READY_S, set[str]()
    while len(ready) < NODES:
        for node in {f"n{number}" for number in range(NODES)} - ready:
            try:
                await chats.ask([{"role": "user", "content": "ready?"}], Counts(), node=node)
                ready.add(node)
            except BenchmarkError:
                chats.require_healthy()
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.5)


def measure_chats(storage: Storage, work_dir: Path, cores: CorePlan, *, rounds: int) -> None:
    """Print how much of the prompts of conversations the nodes had computed before, and how soon answers began."""
    chats = Chats(storage=storage, upstream_url="", work_dir=work_dir, cores=cores, systems=())
    found = {way: Counts() for way in WAYS}
    try:
        asyncio.run(_wait_for_nodes(chats))
        for number in range(rounds):
            for way, weights in WAYS.items():
                chats.weigh(weights)
                counts = asyncio.run(talk(chats, way, number))
                whole = found[way]
                whole.prompt, whole.cached = whole.prompt + counts.prompt, whole.cached + counts.cached
                whole.first_ms += counts.first_ms
        chats.require_healthy()
    finally:
        chats.stop()
    print(f"{LINES} conversations of {TURNS} turns at a time on {NODES} nodes with llama.cpp, {rounds} rounds")
    for way, counts in found.items():
        print(f"  {way:20} {counts}")


_WRITTEN = """SELECT d.xact_commit, t.n_tup_upd, t.n_tup_ins FROM pg_stat_database d, pg_stat_user_tables t
WHERE d.datname = current_database() AND t.relname = 'nodes_nodepresence'"""


def measure_presence(storage: Storage, work_dir: Path, cores: CorePlan, system: System) -> None:
    """Print what the gateway of some nodes takes and has written while nobody asks."""
    muster = Muster(storage=storage, upstream_url="", work_dir=work_dir, cores=cores, systems=[system])
    try:
        time.sleep(_SETTLE_S)
        with psycopg.connect(storage.database_url, autocommit=True) as database:

            def read() -> tuple[float, ...]:
                (commits, updated, inserted) = database.execute(_WRITTEN).fetchone() or (0, 0, 0)
                return time.monotonic(), muster.gateway.cpu_s(), storage.database_cpu_s() or 0.0, commits, updated + inserted

            before = read()
            time.sleep(_WATCH_S)
            passed, cpu, database_cpu, commits, rows = (new - old for new, old in zip(read(), before, strict=True))
        muster.require_healthy()
        print(
            f"  {system:12} {commits / passed:5.1f} transactions and {rows / passed:6.1f} rows of presence per second, "
            f"gateway {cpu / passed:.1%} of a core, PostgreSQL {database_cpu / passed:.1%}, "
            f"gateway {muster.gateway.rss_bytes() / 1e6:.0f} MB"
        )
    finally:
        muster.stop()


def set_up() -> None:
    """Load Django for what is played in this process; nothing of it reaches a database."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    nowhere = {"MUSTER_SECRET_KEY": "benchmark" * 8, "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none",
               "REDIS_URL": "redis://127.0.0.1:1/0"}  # fmt: skip
    missing = {name: value for name, value in nowhere.items() if name not in os.environ}
    os.environ.update(missing)
    django.setup()
    for name in missing:
        del os.environ[name]
    logging.disable(logging.WARNING)


def main(argv: Sequence[str]) -> int:
    """Measure and print; the exit code is 2 when the benchmark could not run."""
    parser = argparse.ArgumentParser(prog="muster bench placement", description=__doc__)
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of conversations (default %(default)d)")
    arguments = parser.parse_args(argv)
    parts = [arguments.only] if arguments.only else PARTS
    cores = plan_cores(pin=True)
    if "contests" in parts or "affinity" in parts:
        set_up()
        from benchmarks.contests import measure_affinity, play_contests  # they need Django

        for part, run in (("contests", play_contests), ("affinity", measure_affinity)):
            if part in parts:
                run()
    try:
        for part in parts:
            systems: dict[str, list[System | None]] = {"chats": [None], "presence": [System.FEW, System.NODES_1000]}
            for system in systems.get(part, []):
                with ExitStack() as stack:
                    work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
                    storage = stack.enter_context(open_storage(cores=cores.around))
                    if system is None:
                        measure_chats(storage, work_dir, cores, rounds=arguments.rounds)
                    else:
                        measure_presence(storage, work_dir, cores, system)
    except BenchmarkError as error:
        print(f"muster bench placement: {error}", file=sys.stderr)
        return 2
    return 0
