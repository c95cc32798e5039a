"""How many tokens a prompt has: by a tokenizer of ours, else by a box that serves the model, else by an estimate."""

from __future__ import annotations

from gateway.counting.counter import TokenCounter, run_beside
from gateway.counting.values import Count, Source

__all__ = ["Count", "Source", "TokenCounter", "run_beside"]
