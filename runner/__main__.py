"""``python -m runner``: read the options, run the box."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from runner.app import run_box
from runner.config import read_config
from runner.errors import ConfigError


def main() -> int:
    """Run the box; return the exit status: 0 after an orderly end, 2 for options that cannot be used."""
    try:
        config = read_config(sys.argv[1:], os.environ)
    except ConfigError as error:
        sys.stderr.write(f"runner: {error}\n")
        return 2
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr
    )
    with asyncio.Runner(loop_factory=_loop_factory()) as loop:
        loop.run(run_box(config))
    return 0


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """Return uvloop's loop where it exists; it halves the cost of a relayed chunk."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


if __name__ == "__main__":
    sys.exit(main())
