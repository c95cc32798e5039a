"""Operations that the control plane carries out itself: a forced drain, and putting everything off a node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from core.limits import limits
from governance.errors import InvalidProposal
from governance.registry import Choices, Description, Done, Impact, Line, RunOrder
from nodes.models import Node
from nodes.operations.targets import Field, NodeOperation, Params, Target, find_signed, judge_live, list_targets, name_of, offer
from nodes.services.drains import EVICT, FORCED_DRAIN, cordon_node, drain_node

ACTOR = "system:governance"


class NodeDrain(NodeOperation):
    """Drain a node with less time for what runs than a plain drain gives."""

    name = FORCED_DRAIN
    title = gettext_noop("Drain a node by force")
    is_remote = False
    fields: Mapping[str, Field] = {"timeout_s": Field("number", is_required=True, least=0, most=86_400)}

    def choices(self) -> Choices:
        """Return what the page that proposes offers: the nodes, and how long what runs may take."""
        usual = _("0 interrupts them at once; a plain drain gives %(seconds)s s.") % {
            "seconds": round(limits().nodes.drain_timeout_s)
        }
        bounds = self.fields["timeout_s"]
        field = {"name": "timeout_s", "label": _("Seconds for requests that run"), "kind": "number", "help": usual}
        return offer(list_targets(), is_remote=False, params=[{**field, "min": bounds.least, "max": bounds.most}])

    def describe(self, targets: Sequence[str], params: Params) -> Description:
        """Return the request in words."""
        usual = _("%(seconds)s s in a plain drain") % {"seconds": round(limits().nodes.drain_timeout_s)}
        time = Line(_("Time for requests that run"), f"{params.get('timeout_s')} s", usual)
        lines = [Line(_("Node"), ", ".join(targets)), time]
        return Description(self.write_sentence(params, ", ".join(map(name_of, targets))), lines)

    def write_sentence(self, params: Params, nodes: str) -> str:
        return _("Drain %(nodes)s by force") % {"nodes": nodes}

    def carry_out(self, order: RunOrder) -> Done:
        """Drain it. Raises InvalidProposal for a node that is gone."""
        seconds = order.params.get("timeout_s")
        timeout_s = float(seconds) if isinstance(seconds, int) else 0.0
        node = _require(order)
        _drain(node, order, timeout_s=timeout_s)
        return Done(f"{node.name} drains; what still runs after {timeout_s:.0f} s is interrupted.")

    def judge(self, target: Target, params: Params, signed: str) -> Iterator[Impact]:
        fate = _("What still runs after %(seconds)s s is interrupted.") % {"seconds": params.get("timeout_s")}
        yield from judge_live(target, None, fate=fate)


class NodeEvict(NodeOperation):
    """End everything that runs on a node, and give it no new work."""

    name = EVICT
    title = gettext_noop("Evict a node (stop all work)")
    is_remote = False

    def choices(self) -> Choices:
        """Return what the page that proposes offers: the nodes."""
        return offer(list_targets(), is_remote=False, params=())

    def describe(self, targets: Sequence[str], params: Params) -> Description:
        """Return the request in words."""
        nodes = [node for node in map(find_signed, targets) if node is not None]
        held = {_("cordoned") for node in nodes if node.cordoned} | {_("draining") for node in nodes if node.draining}
        after = _("cordoned and draining until an operator lifts both")
        lines = [
            Line(_("Node"), ", ".join(targets)),
            Line(_("Requests that run"), _("are interrupted at once")),
            Line(_("Afterwards"), after, ", ".join(sorted(held)) or _("it gets work")),
        ]
        return Description(self.write_sentence(params, ", ".join(map(name_of, targets))), lines)

    def write_sentence(self, params: Params, nodes: str) -> str:
        return _("Evict %(nodes)s") % {"nodes": nodes}

    def carry_out(self, order: RunOrder) -> Done:
        """Cordon it and end what runs. Raises InvalidProposal for a node that is gone."""
        node = _require(order)
        cordon_node(node_id=node.pk, actor=ACTOR)
        _drain(node, order, timeout_s=0)
        return Done(f"{node.name} is cordoned, and what ran on it was interrupted.")

    def judge(self, target: Target, params: Params, signed: str) -> Iterator[Impact]:
        yield from judge_live(target, None, fate=_("All of them are interrupted."))


NODE_DRAIN, NODE_EVICT = NodeDrain(), NodeEvict()


def _require(order: RunOrder) -> Node:
    node = find_signed(order.target)
    if node is None:
        raise InvalidProposal(_("There is no node %(target)s any more.") % {"target": order.target}, param="targets")
    return node


def _drain(node: Node, order: RunOrder, *, timeout_s: float) -> None:
    drain_node(node_id=node.pk, actor=ACTOR, reason=f"operation {order.op_id}"[:200], timeout_s=timeout_s, order=order)
