"""Operations that the control plane carries out itself: a forced drain, and putting everything off a box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from core.limits import limits
from governance.errors import InvalidProposal
from governance.registry import Choices, Description, Done, Impact, Line, NotNow, Request, RunOrder, Sent, Signer
from nodes.models import Node
from nodes.operations.choices import list_boxes, offer
from nodes.operations.impact import DANGER, judge_history, judge_live
from nodes.operations.params import DRAIN_FIELDS, EVICT_FIELDS, Field, clean_params
from nodes.operations.targets import clean_targets, find_signed, name_of, read_target
from nodes.services.drains import cordon_node, drain_node

ACTOR = "system:governance"


class _Holding:
    """What both have in common."""

    name: str
    title: str
    is_remote = False
    fields: Mapping[str, Field]

    def clean(self, targets: Sequence[str], params: Mapping[str, object]) -> Request:
        """Return the request with node ids as targets. Raises InvalidProposal."""
        cleaned = clean_params(params, self.fields)
        return Request(clean_targets(targets, is_remote=False), cleaned)

    def preview(self, targets: Sequence[str], params: Mapping[str, object]) -> Sequence[Impact]:
        """Return what would be cut off."""
        impacts: list[Impact] = []
        for signed in targets:
            target = read_target(signed)
            if target is None:
                impacts.append(Impact(DANGER, f"{signed} is no node that is known here any more."))
                continue
            impacts += judge_live(target, None, verb=self._verb(params))
            impacts += judge_history(self.name, signed, params, target.node.name)
        return impacts

    def find_signer(self, target: str) -> Signer | None:
        """Return None: the control plane does this itself."""
        return None

    def _verb(self, params: Mapping[str, object]) -> str:
        raise NotImplementedError


class NodeDrain(_Holding):
    """Drain a box with less time for what runs than a plain drain gives."""

    name = "node-drain"
    title = "Drain a node by force"
    fields = DRAIN_FIELDS

    def choices(self) -> Choices:
        """Return what the page that proposes offers: the boxes, and how long what runs may take."""
        usual = f"0 interrupts them at once; a plain drain gives {limits().nodes.drain_timeout_s:.0f} s."
        field = {"name": "timeout_s", "label": "Seconds for requests that run", "kind": "number", "help": usual}
        bounds = {"min": DRAIN_FIELDS["timeout_s"].least, "max": DRAIN_FIELDS["timeout_s"].most}
        return offer(list_boxes(), is_remote=False, params=[{**field, **bounds}])

    def describe(self, targets: Sequence[str], params: Mapping[str, object]) -> Description:
        """Return the request in words."""
        usual = f"{limits().nodes.drain_timeout_s:.0f} s in a plain drain"
        lines = [Line("Node", ", ".join(targets)), Line("Time for requests that run", f"{params.get('timeout_s')} s", usual)]
        return Description(f"Drain {_name_all(targets)} by force", lines)

    def carry_out(self, order: RunOrder) -> Sent | Done | NotNow:
        """Drain it. Raises InvalidProposal for a box that is gone."""
        node = _require(order.target)
        seconds = order.params.get("timeout_s")
        timeout_s = float(seconds) if isinstance(seconds, int) else 0.0
        drain_node(node_id=node.pk, actor=ACTOR, reason=f"operation {order.op_id}"[:200], timeout_s=timeout_s, order=order)
        return Done(f"{node.name} drains; what still runs after {timeout_s:.0f} s is interrupted.")

    def _verb(self, params: Mapping[str, object]) -> str:
        return f"what still runs after {params.get('timeout_s')} s is interrupted"


class NodeEvict(_Holding):
    """End everything that runs on a box, and give it no new work."""

    name = "node-evict"
    title = "Evict a node (stop all work)"
    fields = EVICT_FIELDS

    def choices(self) -> Choices:
        """Return what the page that proposes offers: the boxes."""
        return offer(list_boxes(), is_remote=False, params=())

    def describe(self, targets: Sequence[str], params: Mapping[str, object]) -> Description:
        """Return the request in words."""
        lines = [
            Line("Node", ", ".join(targets)),
            Line("Requests that run", "are interrupted at once"),
            Line("Afterwards", "cordoned and draining until an operator lifts both", _held_now(targets)),
        ]
        return Description(f"Evict {_name_all(targets)}", lines)

    def carry_out(self, order: RunOrder) -> Sent | Done | NotNow:
        """Cordon it and end what runs. Raises InvalidProposal for a box that is gone."""
        node = _require(order.target)
        cordon_node(node_id=node.pk, actor=ACTOR)
        drain_node(node_id=node.pk, actor=ACTOR, reason=f"operation {order.op_id}"[:200], timeout_s=0, order=order)
        return Done(f"{node.name} is cordoned, and what ran on it was interrupted.")

    def _verb(self, params: Mapping[str, object]) -> str:
        return "all of them are interrupted"


def _require(target: str) -> Node:
    node = find_signed(target)
    if node is None:
        raise InvalidProposal(f"There is no node {target} any more.", param="targets")
    return node


def _name_all(targets: Sequence[str]) -> str:
    return ", ".join(map(name_of, targets))


def _held_now(targets: Sequence[str]) -> str:
    nodes = [node for node in map(find_signed, targets) if node is not None]
    words = {"cordoned" for node in nodes if node.cordoned} | {"draining" for node in nodes if node.draining}
    return ", ".join(sorted(words)) or "it gets work"
