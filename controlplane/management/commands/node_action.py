"""``manage.py node_action``."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from controlplane.management.service_command import ACTOR, ServiceCommand
from nodes.services.availability import find_node_id
from nodes.services.drains import cordon_node, describe_drain, drain_node, uncordon_node, undrain_node

SIMPLE_ACTIONS = {"cordon": cordon_node, "uncordon": uncordon_node, "undrain": undrain_node}
ACTIONS = {*SIMPLE_ACTIONS, "drain"}


class Command(ServiceCommand):
    """Cordon, uncordon, drain or undrain a box."""

    help = "Cordon, uncordon, drain or undrain a box."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("node", help="its id, node_…, or its name when only one box has it")
        parser.add_argument("action", choices=sorted(ACTIONS))
        parser.add_argument("--reason", default="", help="for drain: shown beside the box and in the audit")
        parser.add_argument("--timeout", type=float, metavar="S", help="for drain: what still runs then is interrupted")

    def act(self, options: dict[str, Any]) -> str:  # Any: parsed options
        node_id, action = find_node_id(options["node"]), options["action"]
        if action == "drain":
            node = drain_node(node_id=node_id, reason=options["reason"], timeout_s=options["timeout"], actor=ACTOR)
        else:
            node = SIMPLE_ACTIONS[action](node_id=node_id, actor=ACTOR)
        said = f"{action} {node.name}: cordoned={node.cordoned} draining={node.draining}"
        drain = describe_drain(node)
        return f"{said} ({drain})" if drain else said
