"""How many examples a generative test tries: few in the gate, MUSTER_TEST_EXAMPLES times as many in the rings."""

from __future__ import annotations

import os

from hypothesis import settings

TIMES = int(os.environ.get("MUSTER_TEST_EXAMPLES", "1"))


def examples(count: int) -> settings:
    """Return the settings of a test that tries so many examples in the gate."""
    return settings(max_examples=count * TIMES, deadline=None)
