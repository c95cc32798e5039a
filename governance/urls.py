"""Addresses of the approval pages."""

from __future__ import annotations

import uuid

from django.urls import include, path, register_converter

from governance.web import approvals, freeze, policy, propose
from wire.ids import parse_id


class OperationIdConverter:
    """The id of an operation in an address: bare, or as it is printed (``op_…``)."""

    regex = "op_[0-9a-f]{32}|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"

    def to_python(self, value: str) -> uuid.UUID:
        """Return the id. The pattern lets nothing else through."""
        found = parse_id("op", value)
        if found is None:
            raise ValueError(value)
        return found

    def to_url(self, value: uuid.UUID) -> str:
        """Return the bare form."""
        return str(value)


register_converter(OperationIdConverter, "operation")

approval_pages = [
    path("", approvals.show_inbox, name="inbox"),
    path("history", approvals.show_history, name="history"),
    path("propose", propose.propose, name="propose"),
    path("policy", policy.show_policy, name="policy"),
    path("policy/draft", policy.draft_policy, name="draft_policy"),
    path("freeze", freeze.freeze, name="freeze"),
    path("<operation:op_id>/", approvals.show_operation, name="operation"),
    path("<operation:op_id>/live", approvals.show_live, name="live"),
    path("<operation:op_id>/evidence", approvals.download_evidence, name="evidence"),
    path("<operation:op_id>/approve", approvals.approve, name="approve"),
    path("<operation:op_id>/reject", approvals.reject, name="reject"),
    path("<operation:op_id>/withdraw", approvals.withdraw, name="withdraw"),
    path("<operation:op_id>/cancel", approvals.cancel, name="cancel"),
    path("<operation:op_id>/use", approvals.use, name="use"),
    path("<operation:op_id>/claim", approvals.claim, name="claim"),
]

urlpatterns = [path("approvals/", include((approval_pages, "approvals")))]
