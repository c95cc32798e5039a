"""The runner, killed (SIGKILL) at a named point of an operation: ``DIE_AT`` is ``before`` or ``after`` a ledger's write."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import ModuleType

from runner.__main__ import main
from runner.ledger import approvals, history

WRITES: dict[str, tuple[ModuleType, str]] = {
    "booking": (approvals, "begin_op"),
    "task": (history, "save_task"),
    "outcome": (approvals, "finish_op"),
}


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
    die_at(os.environ["DIE_AT"])
    sys.exit(main())
