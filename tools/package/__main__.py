"""``./muster package``. Exit status 1 when a check failed; what this machine cannot run fails nothing."""

from __future__ import annotations

import sys

from controlplane.launcher.console import LauncherError, complain
from controlplane.launcher.environment import ROOT
from tools.package import alerts, chart, images, installed, services, supply, wheel
from tools.package.checks import run_checks

CHECKS = (*wheel.CHECKS, *installed.CHECKS, *supply.CHECKS, *chart.CHECKS, *services.CHECKS, *alerts.CHECKS, *images.CHECKS)
"""The table: a module of this folder a topic, each with its own rows, in the order in which they are run."""


def main() -> int:
    try:
        return run_checks(ROOT, CHECKS, sys.argv[1:])
    except LauncherError as error:
        complain(str(error))
    except KeyboardInterrupt:
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
