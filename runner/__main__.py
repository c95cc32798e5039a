"""``python -m runner``: read the options, run the node."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys

from runner.app import run_runner
from runner.config import ALIASES, RunnerConfig, read_config, read_options
from runner.errors import ConfigError, InvalidSettings
from runner.ledger.database import LedgerError
from runner.limits import install
from wire.logs import make_formatter
from wire.variables import describe_aliases, report_variables

log = logging.getLogger("runner")


def main() -> int:
    """Run the node; return the exit status: 0 after an orderly end, 2 for options that cannot be used."""
    if sys.argv[1:2] == ["config"]:
        return show_config(sys.argv[2:])
    try:
        config = read_config(sys.argv[1:], os.environ)
    except ConfigError as error:
        sys.stderr.write(f"runner: {error}\n")
        return 2
    install(config.limits)
    _start_log(config)
    for line in describe_aliases(os.environ, ALIASES):
        log.info("%s", line)
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


def show_config(words: list[str]) -> int:
    """Print every setting of a node with the options in ``words``; ``--check``: what is wrong, and 1 when anything is."""
    own = {word for word in words if word in {"--json", "--check"}}
    _config, options = read_options([word for word in words if word not in own], os.environ)
    problems, notes = list(dict.fromkeys(options.problems)), describe_aliases(os.environ, ALIASES)
    is_check = "--check" in own
    shown = report_variables(options.read.values(), problems, notes, as_json="--json" in own, is_check=is_check)
    sys.stdout.write(f"{shown}\n")
    return int(is_check and bool(problems))


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
