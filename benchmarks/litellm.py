"""LiteLLM as the peer: its proxy with a master key and without a database, one worker."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.nginx import KEY, find_free_port, is_listening
from benchmarks.processes import Child
from benchmarks.toolchain import install_wheels

VERSION = "1.106.2"
_MODEL = "mock"
_START_S = 90.0
# Its command is this function; the script that pip writes would know the folder that the environment was made in.
_SERVE = "from litellm import run_server; run_server()"


def install_litellm() -> Path:
    """Return the Python of an environment with the proxy. Raises BenchmarkError when it cannot be had."""
    return install_wheels(f"litellm-{VERSION}", f"litellm[proxy]=={VERSION}")


class LiteLlm:
    """A running proxy in front of ``upstream_url``; ``python`` is what ``install_litellm`` returned."""

    def __init__(self, python: Path, *, upstream_url: str, work_dir: Path, cores: Sequence[int] = ()) -> None:
        self.port = find_free_port()
        upstream = {"model": f"openai/{_MODEL}", "api_base": f"{upstream_url}/v1", "api_key": "none"}
        model = {"model_name": _MODEL, "litellm_params": upstream}
        config = work_dir / "litellm.json"  # JSON is YAML
        config.write_text(json.dumps({"model_list": [model], "general_settings": {"master_key": KEY}}))
        # Its prices of models come with the wheel; otherwise it would ask GitHub for them.
        env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "LITELLM_TELEMETRY": "False"}
        env = {name: value for name, value in env.items() if name != "DATABASE_URL"}
        argv = [str(python), "-I", "-c", _SERVE, "--config", str(config), "--host", "127.0.0.1", "--port", str(self.port)]
        self.child = Child("litellm", [*argv, "--num_workers", "1"], log_dir=work_dir, cores=cores, env=env)
        try:
            self.child.wait_until(lambda: is_listening(self.port), "LiteLLM was to listen", _START_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the proxy."""
        self.child.stop()
