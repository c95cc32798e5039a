"""Django's command line: what ``muster manage`` runs with the environment of a running installation."""

from __future__ import annotations

import os
import sys

from controlplane.env import report_setting_errors


def main() -> None:
    """Run one management command."""
    report_setting_errors()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")
    from controlplane.commands import run_command

    run_command(sys.argv[1:])


if __name__ == "__main__":
    main()
