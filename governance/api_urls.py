"""Addresses of the REST API of governance."""

from __future__ import annotations

from django.urls import path

from governance.rest import audit_log, decisions, operations, policy
from governance.rest.stream import stream_events

_ONE = "api/v1/operations/<str:op_id>"

urlpatterns = [
    path("api/v1/operations", operations.OperationListView.as_view(), name="operations"),
    path(_ONE, operations.OperationView.as_view(), name="operation"),
    path(f"{_ONE}/statement", operations.StatementView.as_view(), name="operation-statement"),
    path(f"{_ONE}/evidence", operations.EvidenceView.as_view(), name="operation-evidence"),
    path(f"{_ONE}/receipts", operations.ReceiptListView.as_view(), name="operation-receipts"),
    path(f"{_ONE}/events", stream_events, name="operation-events"),
    path(f"{_ONE}/approvals", decisions.ApprovalView.as_view(), name="operation-approvals"),
    path(f"{_ONE}/rejections", decisions.RejectionView.as_view(), name="operation-rejections"),
    path(f"{_ONE}/cancel", decisions.CancelView.as_view(), name="operation-cancel"),
    path(f"{_ONE}/uses", decisions.UseView.as_view(), name="operation-uses"),
    path(f"{_ONE}/claim", decisions.ClaimView.as_view(), name="operation-claim"),
    path("api/v1/policy", policy.PolicyView.as_view(), name="policy"),
    path("api/v1/policy/chain", policy.PolicyChainView.as_view(), name="policy-chain"),
    path("api/v1/policy/drafts", policy.PolicyDraftView.as_view(), name="policy-drafts"),
    path("api/v1/freeze", policy.FreezeView.as_view(), name="freeze"),
    path("api/v1/audit/checkpoint", audit_log.CheckpointView.as_view(), name="audit-checkpoint"),
    path("api/v1/audit/consistency", audit_log.ConsistencyView.as_view(), name="audit-consistency"),
]
