"""The runner, held in its start, with its port open, until the file ``HELD_UNTIL`` exists."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from runner.__main__ import main
from runner.app import Box


def hold_start(until: Path) -> None:
    """Have every box of this process wait for ``until`` before it looks whether its first models have settled."""
    wait_settled = Box._wait_settled

    async def wait_held(box: Box) -> None:
        while not until.exists():  # noqa: ASYNC240 - a look at one name
            await asyncio.sleep(0.01)
        await wait_settled(box)

    Box._wait_settled = wait_held  # type: ignore[method-assign,assignment]  # between an open port and serving


if __name__ == "__main__":
    hold_start(Path(os.environ["HELD_UNTIL"]))
    sys.exit(main())
