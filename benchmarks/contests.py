"""Placement, played and timed in one process: contests of policies, and what affinity costs. Django is set up before."""

from __future__ import annotations

import random
import time
import tracemalloc
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from core.limits import GatewayLimits
from gateway.request.placement import Choice, Placement
from gateway.values import HeaderView, InferenceRequest
from tests.fakes.contest import CONTESTS, Policy
from tests.fakes.links import FakeLink

REQUESTS = {"slow node": 3000, "failing node": 3000, "hot prefix": 2000, "lone client": 800, "conversations": 192}
_PATH = "/v1/chat/completions"
_CALLERS = 500
_NODES = 10
_ROUNDS, _BEST_OF = 10_000, 5


def play_contests() -> None:
    """Print what each policy makes of the same requests and nodes."""
    for name, requests in REQUESTS.items():
        print(f"{name}, {requests:,} requests")
        for policy in Policy:
            print(f"  {policy:20} {CONTESTS[name](policy, requests)}")
            if policy is Policy.SCORE and name in ("hot prefix", "conversations"):
                print(f"  {'score, affinity 0.5':20} {CONTESTS[name](policy, requests, score_affinity=0.5)}")


@dataclass
class _Asker:
    key_id: uuid.UUID | None
    tenant: str = "t"
    headers: Mapping[str, str] | None = None
    request_id: str = "req_1"


def measure_affinity() -> None:
    """Print the CPU that affinity takes of a choice among ten nodes, and what its tables hold when they are full."""
    print(f"CPU of a choice among {_NODES} nodes, µs, the best of {_BEST_OF} rounds")
    for size in (500, 2_000, 17_000):
        without, having = (min(_time_choices(size, affinity) for _ in range(_BEST_OF)) for affinity in (0.0, 0.1))
        print(
            f"  prompt of {size:6,} bytes: {without:5.1f} without affinity, {having:5.1f} with it, {having - without:5.1f} more"
        )
    limits = GatewayLimits()
    print(f"{limits.prefix_blocks:,} blocks and {limits.sessions:,} sessions: {_measure_tables(limits):.1f} MB")


def _list_requests(size: int) -> Iterator[tuple[_Asker, InferenceRequest]]:
    for number in range(_CALLERS):
        body = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"%08d" % number * (size // 8))
        request = InferenceRequest(endpoint=_PATH, paths=(_PATH,), model="m", body=body, prompt_chars=size)
        yield _Asker(uuid.UUID(int=number + 1), headers=HeaderView([(b"host", b"x")])), request


def _time_choices(size: int, affinity: float) -> float:
    """Return microseconds for each choice."""
    placement = Placement(GatewayLimits(score_affinity=affinity))
    links, asked = [FakeLink("m", slots=8) for _ in range(_NODES)], list(_list_requests(size))
    began = time.process_time()
    for number in range(_ROUNDS):
        asker, request = asked[number % _CALLERS]
        wish = placement.read_wish(asker, request, "m", 1.0)
        placement.note(placement.choose(links, "m", wish, held_s=1.0), "m", 1.0)
    return (time.process_time() - began) * 1e6 / _ROUNDS


def _measure_tables(limits: GatewayLimits) -> float:
    """Return how many MB a placement holds that remembers as much as it may."""
    placement, link, draw = Placement(limits), FakeLink("m"), random.Random(1)
    asker, request = next(_list_requests(0))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(max(limits.sessions, 2 * limits.prefix_blocks // limits.prefix_prompt_blocks)):
        asker.key_id = uuid.UUID(int=number + 1)
        wish = placement.read_wish(asker, request, "m", 1.0)
        assert wish is not None
        blocks = [draw.getrandbits(61) for _ in range(limits.prefix_prompt_blocks)]
        placement.note(Choice(link, msgspec.structs.replace(wish, blocks=blocks), "score"), "m", 1.0)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / 1e6
