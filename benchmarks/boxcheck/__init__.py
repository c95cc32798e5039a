"""Checks with figures on the real stand-alone box: ``python -m benchmarks.boxcheck``."""
