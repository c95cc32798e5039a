"""Daphne with flow control in both directions, bounds on what clients send and hold, and a stop that lets requests finish.

Stock Daphne buffers without bound for a client that does not read and for an application that is slower than its
client (django/daphne#170): one socket can take hundreds of megabytes. It also waits without end for a request whose bytes keep
coming, on any number of connections. Nothing else of Daphne is changed.
"""

from __future__ import annotations

from controlplane.daphne_server.server import FlowControlledServer

__all__ = ["FlowControlledServer"]
