"""The runner, altered by the environment so that a test can look at a moment of its life.

``HELD_UNTIL``: its start is held, with its port open, until this file exists. ``DIE_AT``: it is killed (SIGKILL) ``before`` or
``after`` a write of its ledger, as in ``after booking``. With neither it gives what it starts more time before it registers:
on a busy machine the usual two seconds pass too soon.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from runner.__main__ import main
from runner.app import Box
from runner.ledger import approvals, history
from runner.limits import install, limits
from tests.fakes.waiting import eventually

SETTLE_S = 30.0
WRITES: dict[str, tuple[ModuleType, str]] = {
    "booking": (approvals, "begin_op"),
    "task": (history, "save_task"),
    "outcome": (approvals, "finish_op"),
}


def hold_start(until: Path) -> None:
    """Have every node of this process wait for ``until`` before it looks whether its first models have settled."""
    wait_settled = Box._wait_settled

    async def wait_held(box: Box) -> None:
        await eventually(until.exists)
        await wait_settled(box)

    Box._wait_settled = wait_held  # type: ignore[method-assign,assignment]  # between an open port and serving


def die_at(point: str) -> None:
    """Have the process killed at ``before booking``, ``after task`` and the like."""
    moment, _, write = point.partition(" ")
    module, name = WRITES[write]
    real: Callable[..., object] = getattr(module, name)

    def deadly(*arguments: object, **named: object) -> object:
        if moment == "after":
            real(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(module, name, deadly)


if __name__ == "__main__":
    if "HELD_UNTIL" in os.environ:
        hold_start(Path(os.environ["HELD_UNTIL"]))
    elif "DIE_AT" in os.environ:
        die_at(os.environ["DIE_AT"])
    else:
        install(replace(limits(), connection=replace(limits().connection, settle_s=SETTLE_S)))
    sys.exit(main())
