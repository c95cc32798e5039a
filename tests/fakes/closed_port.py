"""A port of loopback at which every connection is refused, for as long as a test needs one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def closed_port() -> Iterator[int]:
    """Hold a port without listening on it: a port that was free a moment ago may be another program's by now.

    On Linux who asks for it by its number and with SO_REUSEADDR may still listen on it.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
