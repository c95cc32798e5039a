"""Addresses of the approval pages, of those on which people sign in and keep their keys, and of the REST API of governance."""

from __future__ import annotations

import uuid

from django.urls import include, path, register_converter

from governance.rest import views
from governance.rest.stream import stream_events
from governance.web import keys, operations, policy, proposals, signin
from wire.ids import parse_id


class OperationIdConverter:
    """The id of an operation in an address: bare, or as it is printed (``op_…``)."""

    regex = "op_[0-9a-f]{32}|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"

    def to_python(self, value: str) -> uuid.UUID:
        found = parse_id("op", value)
        if found is None:
            raise ValueError(value)
        return found

    def to_url(self, value: uuid.UUID) -> str:
        return str(value)


register_converter(OperationIdConverter, "operation")

approval_pages = [
    path("", operations.show_inbox, name="inbox"),
    path("seen", operations.mark_as_seen, name="seen"),
    path("history", operations.show_history, name="history"),
    path("propose", proposals.propose, name="propose"),
    path("policy", policy.show_policy, name="policy"),
    path("policy/draft", policy.draft_policy, name="draft_policy"),
    path("freeze", policy.freeze, name="freeze"),
    path("<operation:op_id>/", operations.show_operation, name="operation"),
    path("<operation:op_id>/live", operations.show_live, name="live"),
    path("<operation:op_id>/evidence", operations.download_evidence, name="evidence"),
    path("<operation:op_id>/approve", operations.approve, name="approve"),
    path("<operation:op_id>/reject", operations.reject, name="reject"),
    path("<operation:op_id>/withdraw", operations.withdraw, name="withdraw"),
    path("<operation:op_id>/cancel", operations.cancel, name="cancel"),
    path("<operation:op_id>/use", operations.use, name="use"),
    path("<operation:op_id>/claim", operations.claim, name="claim"),
]

sign_in_pages = [
    path("", signin.show_login, name="login"),
    path("passkey/options", signin.send_sign_in_options, name="passkey-options"),
    path("passkey", signin.receive_passkey, name="passkey"),
    path("out", signin.sign_out, name="logout"),
    path("oidc", signin.begin_sign_on, name="oidc"),
    path("oidc/callback", signin.finish_sign_on, name="oidc-callback"),
    path("oidc/connect", signin.connect_sign_on, name="oidc-connect"),
    path("oidc/disconnect", signin.disconnect_sign_on, name="oidc-disconnect"),
    path("invitation/<str:token>", signin.show_invitation, name="invitation"),
    path("invitation/<str:token>/options", signin.send_invitation_options, name="invitation-options"),
    path("invitation/<str:token>/passkey", signin.receive_invitation, name="invitation-passkey"),
    path("keys", keys.show_keys, name="keys"),
    path("keys/passkey/options", keys.send_key_options, name="key-options"),
    path("keys/passkey", keys.receive_key, name="key-passkey"),
    path("keys/<int:key_id>/remove", keys.remove_key, name="remove-key"),
    path("totp", keys.show_app, name="totp"),
    path("totp/remove", keys.forget_app, name="remove-totp"),
    path("sessions/end", keys.end_other_sessions, name="end-sessions"),
]

_ONE = "api/v1/operations/<str:op_id>"

urlpatterns = [
    path("api/v1/operations", views.OperationListView.as_view(), name="operations"),
    path(_ONE, views.OperationView.as_view(), name="operation"),
    path(f"{_ONE}/statement", views.StatementView.as_view(), name="operation-statement"),
    path(f"{_ONE}/evidence", views.EvidenceView.as_view(), name="operation-evidence"),
    path(f"{_ONE}/receipts", views.ReceiptListView.as_view(), name="operation-receipts"),
    path(f"{_ONE}/events", stream_events, name="operation-events"),
    path(f"{_ONE}/approvals", views.ApprovalView.as_view(), name="operation-approvals"),
    path(f"{_ONE}/rejections", views.RejectionView.as_view(), name="operation-rejections"),
    path(f"{_ONE}/cancel", views.CancelView.as_view(), name="operation-cancel"),
    path(f"{_ONE}/uses", views.UseView.as_view(), name="operation-uses"),
    path(f"{_ONE}/claim", views.ClaimView.as_view(), name="operation-claim"),
    path("api/v1/policy", views.PolicyView.as_view(), name="policy"),
    path("api/v1/policy/chain", views.PolicyChainView.as_view(), name="policy-chain"),
    path("api/v1/policy/drafts", views.PolicyDraftView.as_view(), name="policy-drafts"),
    path("api/v1/freeze", views.FreezeView.as_view(), name="freeze"),
    path("api/v1/audit/checkpoint", views.CheckpointView.as_view(), name="audit-checkpoint"),
    path("api/v1/audit/consistency", views.ConsistencyView.as_view(), name="audit-consistency"),
    path("api/v1/alerts", views.AlertListView.as_view(), name="alerts"),
    path("api/v1/alerts/<int:alert_id>", views.AlertView.as_view(), name="alert"),
    path("api/v1/alerts/<int:alert_id>/silence", views.AlertSilenceView.as_view(), name="alert-silence"),
    path("approvals/", include((approval_pages, "approvals"))),
    path("sign-in/", include((sign_in_pages, "signin"))),
]
