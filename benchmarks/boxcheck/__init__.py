"""Checks with figures on the real stand-alone node: ``python -m benchmarks.boxcheck``."""
