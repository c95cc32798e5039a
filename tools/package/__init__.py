"""``./muster package``: build everything that is installed somewhere else, and check it as far as this machine can."""
