"""What developers run: tests, checks, mutants, and what those install. Nothing of it is shipped."""
