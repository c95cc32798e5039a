"""The names of tests.fakes.audit_logs, for the tests that import them from here."""
