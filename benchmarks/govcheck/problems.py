"""What Overview says is wrong, one problem a line. Runs in the environment of the control plane."""

from __future__ import annotations

import os
import sys

import django


def main() -> int:
    """Print the problems."""
    os.environ["MUSTER_ADMIN_PAGES"] = "true"  # problems link to pages; most programs of an installation do without them
    django.setup()
    from controlplane.overview import read_overview

    for problem in read_overview().problems:
        sys.stdout.write(f"{problem.what} {problem.advice} {problem.link}: {problem.url}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
