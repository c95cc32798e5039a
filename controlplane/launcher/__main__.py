"""``python -m controlplane.launcher``: the launcher, without its script."""

from __future__ import annotations

import sys

from controlplane.launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
