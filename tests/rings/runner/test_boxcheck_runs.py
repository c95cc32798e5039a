"""The measured checks start real boxes and find them in order."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from benchmarks.processes import ROOT

pytestmark = pytest.mark.timeout(330)
LIMIT_S = 300.0
"""It starts boxes and engines one after the other, which a busy machine does in a minute."""


async def test_limits_and_cycles_pass_and_write_their_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks", "box", "--only", "limits,cycles", "--cycles", "3", "--json", str(figures),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    text = output.decode()
    assert process.returncode == 0, text
    assert "100% (3 of 3)" in text
    checks = json.loads(figures.read_bytes())["checks"]
    assert list(checks) == ["limits", "cycles"]
    assert all(check["passed"] for check in checks.values())
    assert checks["limits"]["figures"]["rate_limit"]["limit"] == 3
    assert len(checks["cycles"]["figures"]["rss_kb"]) == 3
