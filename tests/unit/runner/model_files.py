"""The names of tests.fakes.model_files, for the tests that import them from here."""
