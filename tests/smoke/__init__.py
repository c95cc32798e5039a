"""One installation as a person starts it: ``./muster up``, and the shortest way through everything that it does."""
