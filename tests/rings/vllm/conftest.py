"""Tests on a real vLLM: collected only by ``./muster test --vllm``, which installs one."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("MUSTER_TEST_VLLM") else ["test_*.py"]
