"""Engines, and servers that answer as engines do."""
