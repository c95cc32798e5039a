"""The names of tests.fakes.passkeys, for the tests that import them from here."""
