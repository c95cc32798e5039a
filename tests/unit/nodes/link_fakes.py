"""The names under which other tests import what tests/fakes/links.py has."""

from tests.fakes.links import FakeLink, FakeStream, make_row

__all__ = ["FakeLink", "FakeStream", "make_row"]
