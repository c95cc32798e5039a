"""What needs attention, one problem a line. Runs in the environment of the control plane."""

from __future__ import annotations

import os
import sys

import django


def main() -> int:
    """Print the problems."""
    os.environ["MUSTER_ADMIN_PAGES"] = "true"  # problems link to pages; most programs of an installation do without them
    django.setup()
    from controlplane.problems import look_for_problems
    from governance.alerts import list_open_problems

    look_for_problems()
    for problem in list_open_problems():
        sys.stdout.write(f"{problem.what} {problem.advice} {problem.link}: {problem.url}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
