"""The boxes that an operation is for: from what a person types to what is signed, and back to how they are now."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from core.limits import limits
from governance.errors import InvalidProposal
from nodes.errors import NodeError, NodeNotFound
from nodes.models import Node, NodePresence, ProviderState, read_clock
from nodes.services.availability import find_node_id, judge_status
from nodes.services.telemetry import BoxView, describe_box
from wire.contract import NodeStatus
from wire.ids import parse_id


@dataclass(frozen=True, slots=True)
class Target:
    """A box as an operation sees it now."""

    node: Node
    status: NodeStatus
    box: BoxView

    @property
    def presence(self) -> NodePresence | None:
        """How it does, None when it was never heard."""
        return getattr(self.node, "presence", None)

    @property
    def loaded(self) -> set[str]:
        """Names of the models that it has loaded."""
        return {replica.model for replica in self.box.loaded}


def clean_targets(targets: Sequence[str], *, is_remote: bool) -> tuple[str, ...]:
    """Return the targets as they are signed: runner ids for what the boxes carry out themselves, else ids of nodes.

    Takes runner ids, node ids and names that only one box has. Raises InvalidProposal.
    """
    found: dict[str, None] = {}
    for text in targets:
        node = _find_typed(text.strip())
        if is_remote and not (node.runner_id and node.op_level):
            raise InvalidProposal(
                f"{node.name} takes no operations from here: its program must be connected with a data folder, or an operator "
                "gives its operation key on the node's page.",
                param="targets",
            )
        found[node.runner_id if is_remote else node.printed_id] = None
    if not 1 <= len(found) <= limits().nodes.operation_targets:
        raise InvalidProposal(
            f"Name 1 to {limits().nodes.operation_targets} nodes, each by its runner id, its id or its name.", param="targets"
        )
    return tuple(found)


def read_target(text: str) -> Target | None:
    """Return the box of a signed target; None when there is none any more."""
    node = find_signed(text)
    if node is None:
        return None
    now = read_clock()
    presence: NodePresence | None = getattr(node, "presence", None)
    return Target(node, judge_status(node, presence, now=now), describe_box(node, now=now))


def find_signed(text: str) -> Node | None:
    """Return the box whose runner id or printed id a statement holds."""
    rows = Node.objects.select_related("presence", "credential").exclude(provider__state=ProviderState.DELETED)
    by_id = parse_id("node", text) if text.startswith("node_") else None
    if by_id is not None:
        return rows.filter(pk=by_id).first()
    # Of several that ever had the id, one alone may have it now: the others' credentials are revoked.
    return _choose(list(rows.filter(runner_id=text))) if text else None


def name_of(text: str) -> str:
    """Return what a person calls the box of a signed target."""
    node = find_signed(text)
    return node.name if node is not None else text


def hinders(node: Node) -> str:
    """Return why a box that takes operations cannot be sent one now; "" = it can."""
    if not node.op_level:
        return f"{node.name} takes no operations from here: {node.policy_error or 'it named no level'}"
    if node.op_level == "L2" and not node.policy_version:
        return f"{node.name} has no approval policy pinned; run ./muster trust on it"
    if node.clock_skew_ms is not None and abs(node.clock_skew_ms) > limits().nodes.clock_skew_ms:
        return f"the clock of {node.name} is {abs(node.clock_skew_ms) // 1000} s off; set it, then have the node reconnect"
    return ""


def _find_typed(text: str) -> Node:
    """Return the box that a person means. A box below L2 chooses its runner id, so what nodes are called counts first."""
    try:
        ident: uuid.UUID = find_node_id(text)
    except NodeNotFound as error:
        node = find_signed(text)
        if node is None:
            raise InvalidProposal(error.message, param="targets") from None
        return node
    except NodeError as error:
        raise InvalidProposal(error.message, param="targets") from None
    return Node.objects.get(pk=ident)


def _choose(rows: list[Node]) -> Node | None:
    usable = [node for node in rows if node.credential is None or node.credential.revoked_at is None]
    return max(usable or rows, key=lambda node: node.updated_at, default=None)
