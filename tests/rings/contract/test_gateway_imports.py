"""What the process of a gateway loads before it serves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LATE_OR_NEVER = {
    "aiohttp", "celery", "daphne", "django.contrib.admin.forms", "gateway.admin", "governance.admin", "httpx", "jinja2",
    "nodes.admin", "rest_framework.views", "rich", "tokenizers", "unfold.admin",
}  # fmt: skip
"""What a gateway that was killed must not load before it serves again."""


def test_a_gateway_loads_nothing_before_it_serves_that_it_needs_late_or_never() -> None:
    program = (
        "import atexit, gc, sys; from controlplane.serve_gateway import main; "
        f"loaded = lambda: sorted({LATE_OR_NEVER!r} & set(sys.modules)); "
        "atexit.register(lambda: print(loaded(), gc.get_stats()[2]['collections'])); main()"
    )
    nowhere = {"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none", "REDIS_URL": "redis://127.0.0.1:1/0"}
    environment = {**os.environ, **nowhere, "MUSTER_SECRET_KEY": "k" * 50, "MUSTER_ADMIN_PAGES": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", program, "--port", "0"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "Application startup failed" in ended.stderr, "it was to be loaded, and to find no database"
    assert ended.stdout == "[] 0\n"
