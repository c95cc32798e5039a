"""Tests on a real vLLM: collected only by ``./muster test --vllm``, which installs one. Figures are printed at the end."""

from __future__ import annotations

import os

import pytest

collect_ignore_glob = [] if os.environ.get("MUSTER_TEST_VLLM") else ["test_*.py"]

_FIGURES: dict[str, str] = {}


@pytest.fixture(scope="session")
def figures() -> dict[str, str]:
    """What was measured: name to number with its unit."""
    return _FIGURES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures."""
    if _FIGURES:
        terminalreporter.section("vLLM figures")
        for name, figure in _FIGURES.items():
            terminalreporter.write_line(f"{name:<58} {figure}")
