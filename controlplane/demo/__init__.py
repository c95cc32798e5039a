"""``./muster demo fleet``: an installation as one looks after a week, with nodes, people and traffic that nobody has."""
