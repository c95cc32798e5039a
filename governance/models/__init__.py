"""Tables of governance. Only its services, ``governance.audit`` and ``governance.checkpoints`` write rows."""

from governance.models.approvals import Decision, Freeze, Operation, OperationRun, PolicyVersion
from governance.models.notices import Notice, WebhookEndpoint
from governance.models.people import AdminToken, ApproverKey, Invitation, OneTimePassword, SignInFailure
from governance.models.trail import AuditCheckpoint, AuditEntry, AuditEvent, WitnessStatement

__all__ = [
    "AdminToken",
    "ApproverKey",
    "AuditCheckpoint",
    "AuditEntry",
    "AuditEvent",
    "Decision",
    "Freeze",
    "Invitation",
    "Notice",
    "OneTimePassword",
    "Operation",
    "OperationRun",
    "PolicyVersion",
    "SignInFailure",
    "WebhookEndpoint",
    "WitnessStatement",
]
