"""Engines: the port, one HTTP engine behind it, and an adapter for each kind of server."""
