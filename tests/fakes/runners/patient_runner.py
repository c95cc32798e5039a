"""The runner, with time for what it starts before it registers: on a busy machine its usual two seconds pass too soon."""

from __future__ import annotations

import sys
from dataclasses import replace

from runner.__main__ import main
from runner.limits import install, limits

SETTLE_S = 30.0

if __name__ == "__main__":
    install(replace(limits(), connection=replace(limits().connection, settle_s=SETTLE_S)))
    sys.exit(main())
