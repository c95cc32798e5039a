"""The runner, with time for what it starts before it registers: on a busy machine its usual two seconds pass too soon."""

from __future__ import annotations

import sys

from runner import app
from runner.__main__ import main

SETTLE_S = 30.0

if __name__ == "__main__":
    app.SETTLE_S = SETTLE_S
    sys.exit(main())
