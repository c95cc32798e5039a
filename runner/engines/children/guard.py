"""Start a program of others so that Linux kills it when the runner dies: ``python -m … PARENT_PID COMMAND [ARG …]``."""

from __future__ import annotations

import os
import sys

from runner.engines.children.base import die_with


def main() -> None:
    """Tie this process to its parent, then become COMMAND."""
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606  # an argument list of ours


if __name__ == "__main__":
    main()
