"""The launcher behind ``./muster``. Standard library only: it runs before anything is installed."""
