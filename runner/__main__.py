"""``python -m runner``: read the options, run the node."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys

from runner.app import run_runner
from runner.config import RunnerConfig, read_config
from runner.errors import ConfigError, InvalidSettings
from runner.ledger.database import LedgerError
from runner.limits import install
from wire.logs import make_formatter


def main() -> int:
    """Run the node; return the exit status: 0 after an orderly end, 2 for options that cannot be used."""
    try:
        config = read_config(sys.argv[1:], os.environ)
    except ConfigError as error:
        sys.stderr.write(f"runner: {error}\n")
        return 2
    install(config.limits)
    _start_log(config)
    gc.collect()
    gc.freeze()  # what was imported stays; a request makes some hundred objects, and few of them in circles
    gc.set_threshold(20_000, 20, 20)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as loop:
            loop.run(run_runner(config))
    except (ConfigError, InvalidSettings, LedgerError) as error:
        sys.stderr.write(f"runner: {error}\n")
        return 2
    return 0


def _start_log(config: RunnerConfig) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(make_formatter(config.log_format, is_terminal=sys.stderr.isatty()))
    logging.basicConfig(level=(config.log_level or "info").upper(), handlers=[handler])
    for noisy in ("httpx", "httpx2", "huggingface_hub", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    # uvloop halves the cost of a relayed chunk; it does not exist everywhere.
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


if __name__ == "__main__":
    sys.exit(main())
