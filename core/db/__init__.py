"""Our Django database backend: PostgreSQL's own, whose connections give up on a server that has gone silent."""

from core.db.connection import Patience, PatientConnection, ServerSilent, limit_patience, limit_process
from core.db.loop import LoopConnection

__all__ = ["LoopConnection", "Patience", "PatientConnection", "ServerSilent", "limit_patience", "limit_process"]
