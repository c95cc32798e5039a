"""The names of tests.fakes.recorded_streams, for the tests that import them from here."""
