"""Runners that tests start."""
