"""Replicas over several nodes, put together from what each of their nodes says of them now. Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from nodes.models import Node, ProviderState, clock_of, presence_of, with_clock
from nodes.reports import read_replicas
from nodes.services.availability import judge_status
from wire.bridge import RESERVED, ReplicaInfo
from wire.contract import NodeStatus


class ReplicaState(StrEnum):
    """What a replica does as a whole: it serves only while all of its nodes are there."""

    STARTING = "starting"
    SERVING = "serving"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class MemberState:
    """One node of a replica. ``state`` and ``reason`` as it says; ``state`` is empty when it is away or says nothing."""

    runner_id: str
    node: Node | None
    is_head: bool
    state: str
    reason: str
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpanningReplica:
    """A replica over several nodes. ``members``: the head first; ``reason``: why it ended, of the first that says so."""

    replica_id: str
    model: str
    state: ReplicaState
    reason: str
    members: tuple[MemberState, ...]


def list_replicas() -> list[SpanningReplica]:
    """Return the replicas over several nodes that any node speaks of, by model; one query."""
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).select_related("presence")
    said: dict[str, dict[str, ReplicaInfo]] = {}
    nodes: dict[str, Node] = {}
    for node in with_clock(rows).filter(runner_id__gt=""):
        nodes[node.runner_id] = node
        if judge_status(node, now=clock_of(node)) is not NodeStatus.OFFLINE:
            for replica in read_replicas(presence_of(node).replicas):
                if replica.replica_id and node.runner_id in replica.members:
                    said.setdefault(replica.replica_id, {})[node.runner_id] = replica
    found = [_put_together(replica_id, parts, nodes) for replica_id, parts in said.items()]
    return sorted(found, key=lambda one: (one.model, one.replica_id))


def _put_together(replica_id: str, parts: dict[str, ReplicaInfo], nodes: dict[str, Node]) -> SpanningReplica:
    any_part = next(iter(parts.values()))
    members = tuple(
        _describe(runner_id, parts.get(runner_id), nodes, is_head=place == 0)
        for place, runner_id in enumerate(any_part.members)
    )
    state = _judge(members)
    reason = _explain_end(members) if state is ReplicaState.ENDED else ""
    return SpanningReplica(replica_id, any_part.model, state, reason, members)


def _describe(runner_id: str, part: ReplicaInfo | None, nodes: dict[str, Node], *, is_head: bool) -> MemberState:
    node = nodes.get(runner_id)
    if part is None:
        return MemberState(runner_id, node, is_head, "", "", ())
    return MemberState(runner_id, node, is_head, part.state, part.detail, tuple(part.gpus))


def _explain_end(members: Sequence[MemberState]) -> str:
    told = next((member.reason for member in members if member.state == "failed" and member.reason), "")
    silent = next((member.runner_id for member in members if not member.state), "")
    return told or (f"{silent.partition('#')[0]} says nothing of it" if silent else "")


def _judge(members: Sequence[MemberState]) -> ReplicaState:
    states = [member.state for member in members]
    if "failed" in states or "unloading" in states:
        return ReplicaState.ENDED
    if states[:1] == ["loaded"] and all(state == RESERVED for state in states[1:]):
        return ReplicaState.SERVING
    # A node that is away takes the replica with it, which the others have yet to say.
    return ReplicaState.STARTING if "loading" in states else ReplicaState.ENDED
