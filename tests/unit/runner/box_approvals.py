"""The names of tests.fakes.approvals, for the tests that import them from here."""
