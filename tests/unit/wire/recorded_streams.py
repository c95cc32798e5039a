"""The names of tests.fakes.recorded_streams, for the tests that import them from here."""

from tests.fakes.recorded_streams import *  # noqa: F403
