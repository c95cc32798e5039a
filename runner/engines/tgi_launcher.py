"""A ``text-generation-launcher`` of ours: its command line and environment, and what its log says of a load."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from runner.definitions.plan import LoadPlan
from runner.engines.child import child_environment
from runner.engines.failure_words import FailureWords
from runner.engines.port import Progress, Report
from runner.limits import limits

_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_STAGES: tuple[tuple[str, str, float], ...] = (
    ("Starting check and download process", "checking the files", 0.05),
    ("Successfully downloaded weights", "files checked", 0.2),
    ("Starting shard", "loading weights", 0.25),
    ("Shard ready", "weights loaded", 0.7),
    ("Starting Webserver", "starting the API", 0.75),
    ("Warming up model", "warming up", 0.8),
    ("Connected", "ready", 0.98),
)


class LauncherLog:
    """Fed with the lines of one start."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._words = FailureWords()
        self._reached = 0.0

    def feed(self, line: str) -> None:
        """Take one line, and report the stage that it tells of."""
        self._words.feed(line)
        for words, stage, fraction in _STAGES:
            if words in line and fraction > self._reached:
                self._reached = fraction
                self._report(Progress(stage, fraction))

    def failure(self) -> str:
        """Return why the start failed, an empty text when no reason was given."""
        return self._words.best()


def build_command(plan: LoadPlan, ports: list[int], folder: Path) -> list[str]:
    """Return the command that serves ``plan``. ``ports``: of the API, of its metrics, and for its shards to meet on."""
    options = plan.options
    model = str(plan.path or options.get("server_model") or plan.model_id)
    command = [
        str(options["tgi_launcher"]), "--model-id", model, "--hostname", "127.0.0.1", "--port", str(ports[0]),
        "--prometheus-port", str(ports[1]), "--master-port", str(ports[2]), "--shard-uds-path", str(folder / "s"),
        "--max-batch-size", str(plan.slots), "--max-concurrent-requests", str(max(plan.slots * 2, plan.slots + 8)),
    ]  # fmt: skip
    if plan.context_tokens:
        command += ["--max-total-tokens", str(plan.context_tokens), "--max-input-tokens", str(plan.context_tokens - 1)]
    if len(plan.gpu_ids) > 1:
        command += ["--num-shard", str(len(plan.gpu_ids))]
    if plan.quantization:
        command += ["--quantize", plan.quantization]
    adapters = options.get("tgi_adapters")
    if isinstance(adapters, list | tuple) and adapters:
        command += ["--lora-adapters", ",".join(str(name) for name in adapters)]
    return command


def build_environment(plan: LoadPlan, key: str) -> dict[str, str]:
    """Return the launcher's environment; ``key`` is what its API is to ask for."""
    caching = "1" if plan.options.get("tgi_prefix_caching") is True else "0"
    return child_environment() | {
        "API_KEY": key,  # not on the command line, which every user of the machine can read
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "USAGE_STATS": "off",
        "PREFIX_CACHING": caching,
        "USE_PREFIX_CACHING": caching,
        "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in plan.gpu_ids),
    }


def free_ports(count: int) -> list[int]:
    """Return loopback ports that nothing has now; TGI cannot pick them itself and tell.

    Where Linux says which ports it gives to those that ask for any, they lie below: until TGI listens, nothing else gets them.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in _candidates(count):
            place = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                place.bind(("127.0.0.1", port))
                found.append(place.getsockname()[1])
            if len(found) == count:
                break
    return found


def _candidates(count: int) -> Iterator[int]:
    """Yield ports to try, 0 = any."""
    lowest, tries = limits().engines.tgi_lowest_port, limits().engines.tgi_port_tries
    width = lowest_given_port() - lowest
    if width > tries:
        yield from (lowest + secrets.randbelow(width) for _ in range(tries))
    yield from [0] * count


def lowest_given_port() -> int:
    """Return the lowest port that Linux gives to those that ask for any, 0 where that is not known."""
    try:
        return int(_GIVEN_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0
