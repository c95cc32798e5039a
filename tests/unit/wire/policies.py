"""The names of tests.fakes.policies, for the tests that import them from here."""
