"""Checks with figures on governed operations of a whole installation."""
