"""Scenario of the demo: its nodes, models, tenants and people, as plain values. What is drawn comes from ``SEED``."""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from datetime import timedelta

from wire import RELEASE

SEED = 17
ACTOR = "system:demo"
CREDENTIAL = "demo nodes"
GATEWAY_ID = uuid.uuid5(uuid.NAMESPACE_DNS, "demo.muster.example")
"""The gateway that answered the requests of the week; it is gone."""
VERSION, OLD_VERSION = RELEASE, "0.0.7"
GIB = 1024
"""MiB of one."""
CHAT, EMBEDDINGS, SPEECH = "/v1/chat/completions", "/v1/embeddings", "/v1/audio/transcriptions"


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model as nodes declare it. ``prices``: of a million prompt and generated tokens; sizes in MiB."""

    name: str
    weights_mb: int
    context_tokens: int
    prices: tuple[str, str]
    engine: str = "vllm"
    tokens_per_s: float = 60.0
    ttft_ms: float = 250.0
    endpoint: str = CHAT


_QWEN, _CODER, _SMALL = "qwen3-32b", "qwen2.5-coder-32b", "qwen3-8b"
_LLAMA, _MINI, _OSS = "llama-3.3-70b", "llama-3.1-8b", "gpt-oss-120b"
_MISTRAL, _GEMMA, _DEEPSEEK, _PHI = "mistral-small-24b", "gemma-3-27b", "deepseek-r1-70b", "phi-4-14b"
_BGE, _WHISPER = "bge-m3", "whisper-large-v3"

MODELS = (
    DemoModel(_LLAMA, 74 * GIB, 131_072, ("0.60", "0.80"), tokens_per_s=48, ttft_ms=420),
    DemoModel(_OSS, 63 * GIB, 131_072, ("0.50", "1.50"), tokens_per_s=95, ttft_ms=310),
    DemoModel(_QWEN, 19 * GIB, 40_960, ("0.20", "0.60"), engine="llama.cpp", tokens_per_s=38, ttft_ms=350),
    DemoModel(_CODER, 19 * GIB, 32_768, ("0.20", "0.60"), engine="llama.cpp", tokens_per_s=36, ttft_ms=380),
    DemoModel(_SMALL, 9 * GIB, 40_960, ("0.05", "0.15"), engine="llama.cpp", tokens_per_s=52, ttft_ms=180),
    DemoModel(_MINI, 8 * GIB, 131_072, ("0.05", "0.10"), engine="llama.cpp", tokens_per_s=70, ttft_ms=140),
    DemoModel(_MISTRAL, 14 * GIB, 32_768, ("0.10", "0.30"), tokens_per_s=55, ttft_ms=220),
    DemoModel(_GEMMA, 28 * GIB, 131_072, ("0.15", "0.45"), tokens_per_s=42, ttft_ms=300),
    DemoModel(_DEEPSEEK, 74 * GIB, 65_536, ("0.70", "1.90"), tokens_per_s=40, ttft_ms=520),
    DemoModel(_PHI, 9 * GIB, 16_384, ("0.07", "0.14"), engine="llama.cpp", tokens_per_s=33, ttft_ms=260),
    DemoModel(_BGE, 2 * GIB, 8_192, ("0.01", "0"), ttft_ms=35, endpoint=EMBEDDINGS),
    DemoModel(_WHISPER, 4 * GIB, 448, ("0.02", "0.02"), engine="faster-whisper", ttft_ms=900, endpoint=SPEECH),
)
BY_NAME = {model.name: model for model in MODELS}
MISSING = "mixtral-8x22b"
"""Clients may use it, and no node has it."""
ALIASES = (
    ("gpt-4o", ((_LLAMA, 100),), ""), ("gpt-4o-mini", ((_SMALL, 70), (_MINI, 30)), ""), ("coder", ((_CODER, 100),), ""),
    ("default", ((_QWEN, 100),), "support-bot"), ("text-embedding-3-small", ((_BGE, 100),), ""),
    ("whisper-1", ((_WHISPER, 100),), ""),
)  # fmt: skip
"""Name, targets with their weights, and the tenant that it is of; empty = everybody."""
FALLBACKS = {_LLAMA: [_OSS], _QWEN: [_SMALL], _CODER: [_QWEN], _DEEPSEEK: [_OSS]}


@dataclass(frozen=True, slots=True)
class DemoNode:
    """A node, and how it does. ``models``: with the numbers of the GPUs that each is on.

    ``busy``: how much of it is in use at noon, 0 to 1; ``clock_s``: by how much its clock is ahead. ``offline``: for how long
    nothing was heard of it. ``loading``: a model that it loads all the time; ``failed``: one that it cannot load, and why.
    """

    name: str
    gpu: str
    gpus: int
    vram_mb: int
    models: tuple[tuple[str, tuple[int, ...]], ...]
    slots: int = 8
    busy: float = 0.4
    watts: float = 300.0
    vendor: str = "nvidia"
    version: str = VERSION
    owner: str = ""
    speed: float = 1.0
    clock_s: float = 0.0
    offline: timedelta | None = None
    loading: str = ""
    failed: tuple[str, str] = ("", "")
    fails: float = 0.001
    """The share of its requests that fail."""
    available: tuple[str, ...] = ()
    is_cordoned: bool = False
    is_drained: bool = False
    is_draining: bool = False
    level: str = "L2"
    last_error: str = ""

    @property
    def id(self) -> uuid.UUID:
        return uuid.uuid5(GATEWAY_ID, self.name)

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.models)


_OUT_OF_MEMORY = "CUDA error: out of memory, 9216 MiB wanted, 8714 MiB free"

NODES = (
    DemoNode("atlas", "NVIDIA H100 80GB HBM3", 8, 81_559, ((_LLAMA, (0, 1, 2, 3)), (_OSS, (4, 5, 6, 7))), slots=64, busy=0.72,
             watts=560, owner="Datacentre", available=(_DEEPSEEK, _GEMMA)),
    DemoNode("borealis", "NVIDIA GeForce RTX 4090", 2, 24_564, ((_QWEN, (0, 1)),), slots=8, busy=0.35, watts=340, owner="Ana",
             available=(_CODER, _SMALL, _MISTRAL)),
    DemoNode("ceres", "NVIDIA GeForce RTX 4090", 2, 24_564, ((_CODER, (0, 1)),), slots=4, busy=0.88, watts=355, owner="Ben",
             available=(_QWEN, _SMALL)),
    DemoNode("draco", "NVIDIA RTX A4000", 1, 16_376, ((_SMALL, (0,)),), slots=2, busy=0.62, watts=125, version=OLD_VERSION,
             owner="Cleo", speed=0.8, available=(_MINI, _PHI)),
    DemoNode("ember", "NVIDIA L40S", 1, 46_068, ((_MISTRAL, (0,)),), slots=8, busy=0.45, watts=265, owner="Datacentre",
             loading=_GEMMA, available=(_PHI,)),
    DemoNode("fjord", "NVIDIA A100-SXM4-80GB", 4, 81_920, ((_DEEPSEEK, (0, 1, 2)), (_BGE, (3,))), slots=16, busy=0.5, watts=310,
             owner="Datacentre", is_draining=True, available=(_LLAMA,)),
    DemoNode("gaia", "NVIDIA GeForce RTX 3090", 2, 24_576, ((_QWEN, (0, 1)),), slots=8, busy=0.0, watts=280, owner="Ben",
             is_drained=True),
    DemoNode("helios", "AMD Radeon RX 7900 XTX", 1, 24_560, ((_MINI, (0,)),), slots=4, busy=0.0, watts=255, vendor="amd",
             owner="Cleo", is_cordoned=True),
    DemoNode("iris", "NVIDIA GeForce RTX 4090", 1, 24_564, ((_MINI, (0,)),), slots=4, busy=0.4, watts=320, owner="Dan",
             offline=timedelta(hours=5, minutes=12)),
    DemoNode("juno", "NVIDIA GeForce RTX 3060", 1, 12_288, ((_PHI, (0,)),), slots=2, busy=0.3, watts=140, owner="Eve",
             failed=(_MINI, _OUT_OF_MEMORY), fails=0.07, last_error=_OUT_OF_MEMORY),
    DemoNode("kepler", "Tesla T4", 1, 15_360, ((_WHISPER, (0,)), (_BGE, (0,))), slots=4, busy=0.25, watts=62,
             owner="Datacentre", clock_s=97.0),
    DemoNode("studio", "Apple M2 Ultra", 1, 192 * GIB, ((_LLAMA, (0,)), (_MINI, (0,))), slots=4, busy=0.3, watts=110,
             vendor="apple", owner="Ana", speed=0.35),
)  # fmt: skip
NODE = {node.name: node for node in NODES}


@dataclass(frozen=True, slots=True)
class DemoTenant:
    """A tenant. ``share``: of the requests; ``models``: what it asks for, with weights; ``budget``: kind, and how much of it
    is used by now, 0 to 1.
    """

    name: str
    share: float
    models: tuple[tuple[str, float], ...]
    keys: tuple[str, ...]
    prompt: int
    answer: int
    streams: float = 0.8
    budget: tuple[str, float, bool] | None = None
    weight: int = 100


TENANTS = (
    DemoTenant("code-assist", 0.36, ((_CODER, 7), (_QWEN, 2), (_OSS, 1)), ("ide-plugin", "review-bot"), 2_600, 240, 0.95,
               ("tokens_per_day", 0.41, True), weight=150),
    DemoTenant("marketing", 0.09, ((_MISTRAL, 5), (_LLAMA, 3), (_GEMMA, 1)), ("campaigns", "translations"), 700, 420, 0.5,
               ("cost_per_month", 0.97, True)),
    DemoTenant("platform", 0.19, ((_BGE, 6), (_WHISPER, 2), (_PHI, 1)), ("search-index", "meeting-notes"), 380, 60, 0.1),
    DemoTenant("research", 0.14, ((_DEEPSEEK, 4), (_OSS, 4), (_LLAMA, 2)), ("notebooks", "batch-eval", "ana"), 1_900, 900, 0.6,
               ("cost_per_month", 0.63, False), weight=50),
    DemoTenant("support-bot", 0.22, ((_QWEN, 5), (_SMALL, 4), (_MINI, 1)), ("chat-widget", "mail-triage"), 1_100, 190, 0.9,
               ("cost_per_day", 0.55, True)),
)  # fmt: skip
PEOPLE = (("ana", "Ana", "Ito"), ("ben", "Ben", "Okafor"), ("cleo", "Cleo", "Marin"))
"""Approvers beside the administrator; the first one asks for operations."""

REQUESTS = 110_000
"""Of the week, about."""
DAYS = 7
_PEAK = timedelta(hours=2)
"""How long before now the middle of the day was: pages look the same whatever the hour."""


def rate_at(age: timedelta) -> float:
    """Return how busy everything was so long ago, from 0 at night to 1 at the middle of a working day."""
    height = 0.5 + 0.5 * math.cos(2 * math.pi * ((age - _PEAK) / timedelta(days=1)))
    is_weekend = timedelta(days=3) < age - _PEAK + timedelta(hours=12) < timedelta(days=5)
    return (0.06 + 0.94 * math.pow(height, 1.6)) * (0.35 if is_weekend else 1.0)


@dataclass(frozen=True, slots=True)
class Burst:
    """A time at which something went wrong: ``began`` ago, for so long."""

    began: timedelta
    length: timedelta
    node: str
    fails: float
    error: str


BURSTS = (
    Burst(timedelta(days=2, hours=3), timedelta(minutes=50), "ceres", 0.45, "CUDA error: an illegal memory access"),
    Burst(timedelta(hours=3, minutes=20), timedelta(minutes=25), "juno", 0.5, _OUT_OF_MEMORY),
)
