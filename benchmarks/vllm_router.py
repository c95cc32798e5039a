"""vllm-router as the peer: the best LLM router per request, one worker, without a key check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.nginx import find_free_port, is_listening
from benchmarks.processes import Child
from benchmarks.toolchain import install_wheels

VERSION = "0.1.17"
_REQUIREMENT = (
    f"vllm-router=={VERSION} --hash=sha256:85c96bea4d573a49b5a8ae4c72ee3dfe733aba26b6f1ff1256e6142f1f42694d"  # x86-64 Linux
)
_START_S = 30.0

# The wheel's own command loads packages for a debugging mode beside the Rust router; without it the wheel needs no other.
_SERVE = """\
import sys
from vllm_router.router import Router
from vllm_router.router_args import RouterArgs
worker, port, metrics_port = sys.argv[1:]
Router.from_args(RouterArgs(
    worker_urls=[worker], port=int(port), prometheus_port=int(metrics_port), policy="round_robin",
    worker_startup_check_interval=1, log_level="warn",
)).start()
"""


def install_vllm_router() -> Path:
    """Return the Python of an environment that holds the pinned wheel alone. Raises BenchmarkError when it cannot be had."""
    return install_wheels(f"vllm-router-{VERSION}", _REQUIREMENT, "--no-deps", "--require-hashes")


class VllmRouter:
    """A running vllm-router in front of ``upstream_url``; ``python`` is what ``install_vllm_router`` returned."""

    def __init__(self, python: Path, *, upstream_url: str, work_dir: Path, cores: Sequence[int] = ()) -> None:
        self.port = find_free_port()
        argv = [str(python), "-I", "-c", _SERVE, upstream_url, str(self.port), str(find_free_port())]
        self.child = Child("vllm-router", argv, log_dir=work_dir, cores=cores)
        try:
            self.child.wait_until(lambda: is_listening(self.port), "vllm-router was to listen", _START_S)
        except BenchmarkError:
            self.stop()
            raise

    def stop(self) -> None:
        """End the router."""
        self.child.stop()
