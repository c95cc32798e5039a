"""Every change to the registry of boxes: one function each, called by REST, admin pages, tasks and sockets alike."""

from __future__ import annotations

from nodes.services.boxes import count_replicas, describe_box, describe_counts
from nodes.services.credentials import (
    create_credential,
    find_credential,
    find_credentials,
    read_credential_digests,
    revoke_credential,
)
from nodes.services.direct_calls import ring_direct_box
from nodes.services.drains import describe_drain
from nodes.services.governance import set_op_key, take_governance, take_report
from nodes.services.health import describe_gpus, heartbeat_age_s, is_drained, judge_status, should_drain, status_expression
from nodes.services.lifecycle import cordon_node, drain_node, set_mode, uncordon_node, undrain_node
from nodes.services.policy_pins import read_policy_pins
from nodes.services.probe import probe_direct_nodes
from nodes.services.providers import create_provider, delete_provider, disable_provider, enable_provider
from nodes.services.registry import (
    Heartbeat,
    HeartbeatResult,
    Registration,
    claim_node,
    record_heartbeat,
    register_direct_node,
    require_own_node,
    set_api_key,
)
from nodes.services.sweep import SweepReport, sweep_presence

__all__ = [
    "Heartbeat",
    "HeartbeatResult",
    "Registration",
    "SweepReport",
    "claim_node",
    "cordon_node",
    "count_replicas",
    "create_credential",
    "create_provider",
    "delete_provider",
    "describe_box",
    "describe_counts",
    "describe_drain",
    "describe_gpus",
    "disable_provider",
    "drain_node",
    "enable_provider",
    "find_credential",
    "find_credentials",
    "heartbeat_age_s",
    "is_drained",
    "judge_status",
    "probe_direct_nodes",
    "read_credential_digests",
    "read_policy_pins",
    "record_heartbeat",
    "register_direct_node",
    "require_own_node",
    "revoke_credential",
    "ring_direct_box",
    "set_api_key",
    "set_mode",
    "set_op_key",
    "should_drain",
    "status_expression",
    "sweep_presence",
    "take_governance",
    "take_report",
    "uncordon_node",
    "undrain_node",
]
