"""The database backend that ``DATABASES`` names: Django's, with connections bound by the patience of their thread."""

from __future__ import annotations

import select
from typing import Any

from django.db.backends.postgresql import base
from psycopg import IsolationLevel

from core.db.connection import PatientConnection, read_patience
from core.limits import limits


class DatabaseWrapper(base.DatabaseWrapper):
    """Django's PostgreSQL backend. Without ``limit_patience`` and ``limit_process`` it behaves exactly like it."""

    def get_connection_params(self) -> dict[str, Any]:  # Any: Django's own signature
        """Return the arguments of ``connect``, with the server's own limits where the thread is bound by one."""
        parameters: dict[str, Any] = super().get_connection_params()
        patience = read_patience()
        if patience is not None:
            least_s = limits().core.database_statement_s
            limit_s = patience.left_s if patience.ends_at is not None else max(least_s, patience.silence_s)
            limit = f"-c statement_timeout={max(1, int(1000 * limit_s))}"
            parameters["options"] = f"{parameters.get('options', '')} {limit}".strip()
            parameters["connect_timeout"] = _limit_connect(str(parameters.get("connect_timeout", "")), patience.left_s)
        return parameters

    def keep(self) -> None:
        """Leave the connection open for the next work of this thread, whatever ``CONN_MAX_AGE`` says."""
        self.close_at = None

    def close_if_left(self) -> None:
        """Close a kept connection that the server closed meanwhile, so that the next statement opens another. Asks nothing."""
        if self.connection is None or self.in_atomic_block:
            return
        told = select.poll()
        told.register(self.connection.pgconn.socket, select.POLLIN)
        if told.poll(0):  # a server says nothing to who asks nothing, but that it ends
            self.close()

    def get_new_connection(self, conn_params: dict[str, Any]) -> PatientConnection:
        """Return an open connection. Raises OperationalError of the driver."""
        self.isolation_level = IsolationLevel.READ_COMMITTED
        return PatientConnection.connect(**conn_params)


def _limit_connect(given: str, left_s: float) -> int:
    """Return libpq's ``connect_timeout``, whole seconds: what the URL says, where that is a limit and a lower one."""
    # libpq waits no less than that.
    limit_s = max(limits().core.database_least_connect_s, int(left_s))
    return min(limit_s, int(given)) if given.isdecimal() and int(given) > 0 else limit_s
