"""Every change to what governance keeps, and what others read of it. Pages, APIs, tasks and other apps come through here."""

from governance.services.admin_tokens import claim_admin_token, create_admin_token, revoke_admin_token, verify_admin_token
from governance.services.decisions import approve, reject, withdraw
from governance.services.evidence import policy_chain, read_evidence
from governance.services.freezes import freeze, lift_freeze, name_freeze, read_freeze
from governance.services.guard import is_governed, require_approval
from governance.services.policies import ApproverChoice, active_policy, adopt_policy, draft_policy
from governance.services.proposals import cancel, propose
from governance.services.reading import (
    count_waiting_for,
    list_policy_versions,
    read_history,
    read_inbox,
    read_operation,
    summarise,
)
from governance.services.reviews import explain_own_review, list_users
from governance.services.runs import (
    LastRun,
    finish_run,
    last_run,
    list_last_successes,
    note_progress,
    requeue_run,
    run_due,
    work_on,
)
from governance.services.standing import use_approval
from governance.services.sweeps import reconcile
from governance.services.values import DecisionView, Inbox, OperationSummary, OperationView, Proposer, RunView

__all__ = [
    "ApproverChoice",
    "DecisionView",
    "Inbox",
    "LastRun",
    "OperationSummary",
    "OperationView",
    "Proposer",
    "RunView",
    "active_policy",
    "adopt_policy",
    "approve",
    "cancel",
    "claim_admin_token",
    "count_waiting_for",
    "create_admin_token",
    "draft_policy",
    "explain_own_review",
    "finish_run",
    "freeze",
    "is_governed",
    "last_run",
    "lift_freeze",
    "list_last_successes",
    "list_policy_versions",
    "list_users",
    "name_freeze",
    "note_progress",
    "policy_chain",
    "propose",
    "read_evidence",
    "read_freeze",
    "read_history",
    "read_inbox",
    "read_operation",
    "reconcile",
    "reject",
    "requeue_run",
    "require_approval",
    "revoke_admin_token",
    "run_due",
    "summarise",
    "use_approval",
    "verify_admin_token",
    "withdraw",
    "work_on",
]
