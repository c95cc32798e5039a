"""Which box holds which approval policy, for the page of the policy. ``settings.GOVERNANCE_BOXES`` names the function."""

from __future__ import annotations

from governance.services import active_policy
from nodes.models import Node, ProviderState

TRUST = "run ./muster trust on it"


def read_policy_pins() -> list[dict[str, str]]:
    """Return {"name", "text"} for each box that may come back, by name: its level, what it pinned beside what is in force."""
    found = active_policy()
    newest = found[0].version if found is not None else 0
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).exclude(credential__revoked_at__isnull=False)
    return [{"name": node.name, "text": describe_pin(node, newest=newest)} for node in rows.order_by("name", "pk")]


def describe_pin(node: Node, *, newest: int) -> str:
    """Return what a box holds, in words. ``newest``: the version in force, 0 = none."""
    if not node.op_level:
        return f"takes no operations from here{_add(node.policy_error)}"
    if node.op_level != "L2":
        return f"level {node.op_level}: it checks a key and no approvals, so it pins no policy"
    if not node.policy_version:
        return f"level L2, none pinned: {TRUST}{_add(node.policy_error)}"
    return f"level L2, version {node.policy_version} pinned{_compare(node.policy_version, newest)}{_add(node.policy_error)}"


def _compare(pinned: int, newest: int) -> str:
    if not newest:
        return "; none is in force here"
    if pinned < newest:
        return f"; version {newest} is in force, which is offered to it while it is connected"
    return "" if pinned == newest else f"; version {newest} is in force here, an older one"


def _add(error: str) -> str:
    return f"; it says: {error}" if error else ""
