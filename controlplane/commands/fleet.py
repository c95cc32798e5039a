"""Commands for what requests and nodes need: models, client keys, node credentials, nodes, providers, webhooks."""

from __future__ import annotations

from argparse import ArgumentParser
from contextlib import suppress

from controlplane.commands import ACTOR, Options, argument, command
from gateway.services.decisions import find_decision, print_decision, print_replay, read_weights
from gateway.services.decisions import replay_routing as score_anew
from gateway.services.errors import NameTaken
from gateway.services.keys import create_api_key
from gateway.services.models import allow_model, disallow_model
from gateway.services.tenants import create_tenant
from gateway.values import Priority
from governance.notices import Wishes, add_webhook, list_webhooks, remove_webhook
from governance.states import Severity
from nodes.errors import Conflict
from nodes.services.availability import find_node_id
from nodes.services.credentials import (
    change_provider_terms,
    create_credential,
    create_provider,
    delete_provider,
    disable_provider,
    enable_provider,
)
from nodes.services.drains import cordon_node, describe_drain, drain_node, uncordon_node, undrain_node
from nodes.services.tickets import describe_ticket_keys, rotate_ticket_key

NODE_ACTIONS = {"cordon": cordon_node, "uncordon": uncordon_node, "undrain": undrain_node}
PROVIDER_STATES = {"enabled": enable_provider, "disabled": disable_provider, "deleted": delete_provider}


@command(
    "allow_model",
    "Let clients use a model. Under a policy, higher caps than it has need approval (limit-raise).",
    argument("name", help="exactly as nodes declare it and clients ask for it"),
    argument("--max-tokens", type=int, metavar="N", help="cap on generated tokens; left out, as it is"),
    argument("--max-prompt-chars", type=int, metavar="N", help="cap on the prompt in characters"),
    argument("--max-queue", type=int, metavar="N", help="how many requests may wait for a node"),
)
def allow(options: Options) -> str:
    caps = {name: options[name] for name in ("max_tokens", "max_prompt_chars", "max_queue")}
    return f"{allow_model(name=options['name'], actor=ACTOR, **caps).name} is allowed"


@command("disallow_model", "Refuse a model to clients.", argument("name"))
def disallow(options: Options) -> str:
    return f"{disallow_model(name=options['name'], actor=ACTOR).name} is not allowed any more"


@command(
    "create_key",
    "Create a client API key and print it. It is shown this once.",
    argument("--tenant", required=True, help="made when there is none of that name"),
    argument("--name", required=True, help="who or what will use it"),
    argument("--rpm", type=int, metavar="N", help="requests per minute; default: the tenant's"),
    argument("--models", default="", metavar="A,B", help="models it may use; default: every allowed one"),
    argument(
        "--priority", choices=list(Priority), default=Priority.NORMAL, type=str, help="how a node orders what waits on it"
    ),
)
def create_key(options: Options) -> str:
    with suppress(NameTaken):
        create_tenant(name=options["tenant"], actor=ACTOR)
    _, text = create_api_key(
        name=options["name"],
        tenant_name=options["tenant"],
        requests_per_minute=options["rpm"],
        allowed_models=[name for name in options["models"].split(",") if name.strip()],
        priority=options["priority"],
        actor=ACTOR,
    )
    return text


@command(
    "create_worker_credential",
    "Create a credential for GPU nodes and print it. It is shown this once.",
    argument("--name", required=True, help="which node or nodes will use it"),
    argument("--provider", default="local", help="made when there is none of that name (default: local)"),
    argument("--max-nodes", type=int, default=1, metavar="N", help="how many nodes may enrol with it"),
    argument("--allow-models", action="store_true", help="clients may use what its nodes declare"),
)
def create_worker_credential(options: Options) -> str:
    with suppress(Conflict):
        create_provider(name=options["provider"], actor=ACTOR)
    return create_credential(
        name=options["name"],
        provider_name=options["provider"],
        max_nodes=options["max_nodes"],
        allows_models=options["allow_models"],
        actor=ACTOR,
    )[1]


@command(
    "node_action",
    "Cordon, uncordon, drain or undrain a node.",
    argument("node", help="its id, node_…, or its name when only one node has it"),
    argument("action", choices=sorted({*NODE_ACTIONS, "drain"})),
    argument("--reason", default="", help="for drain: shown beside the node and in the audit"),
    argument("--timeout", type=float, metavar="S", help="for drain: what still runs then is interrupted"),
)
def node_action(options: Options) -> str:
    node_id, action = find_node_id(options["node"]), options["action"]
    if action == "drain":
        node = drain_node(node_id=node_id, reason=options["reason"], timeout_s=options["timeout"], actor=ACTOR)
    else:
        node = NODE_ACTIONS[action](node_id=node_id, actor=ACTOR)
    said = f"{action} {node.name}: cordoned={node.cordoned} draining={node.draining}"
    drain = describe_drain(node)
    return f"{said} ({drain})" if drain else said


@command(
    "set_provider_state",
    "Switch the nodes of a provider on or off, or end the provider.",
    argument("name"),
    argument("state", choices=sorted(PROVIDER_STATES)),
)
def set_provider_state(options: Options) -> str:
    PROVIDER_STATES[options["state"]](name=options["name"], actor=ACTOR)
    return f"{options['name']} is {options['state']}"


@command(
    "set_provider_terms",
    "Set how requests wait for the models of a provider. What is left out is as everywhere.",
    argument("name"),
    argument("--max-queue", type=int, metavar="N", help="how many may wait for all its models together"),
    argument("--queue-s", type=int, metavar="S", help="longest wait for a slot"),
    argument("--no-node-s", type=int, metavar="S", help="longest wait while none of its nodes is there"),
    argument("--max-models", type=int, metavar="N", help="how many models one of its nodes may declare"),
)
def set_provider_terms(options: Options) -> str:
    terms = {name: options[name] for name in ("max_queue", "queue_s", "no_node_s", "max_models")}
    change_provider_terms(name=options["name"], **terms, actor=ACTOR)
    said = ", ".join(f"{name} {value}" for name, value in terms.items() if value is not None)
    return f"{options['name']} has {said or 'no terms of its own'}"


def _add_webhook_actions(parser: ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    add = actions.add_parser("add", help="post notices there; prints the secret that signs them, this once")
    add.add_argument("name")
    add.add_argument("url", help="https://…, or http://… on this machine or a private network")
    add.add_argument("--usage", action="store_true", help="what each finished request used, in batches, instead of notices")
    add.add_argument("--format", default="generic", metavar="F", help="generic (signed JSON), slack, discord, teams or ntfy")
    add.add_argument(
        "--alerts", choices=[one.word for one in Severity], help="starts and ends of alerts at least so urgent too"
    )
    actions.add_parser("remove", help="post nothing there any more").add_argument("name")
    actions.add_parser("list", help="names and states; addresses may be secret and are not shown")


@command("webhook", "Add, list or remove the webhooks that notices of operations are posted to.", _add_webhook_actions)
def webhook(options: Options) -> str:
    match options["action"]:
        case "add":
            least = Severity[options["alerts"].upper()] if options["alerts"] else None
            wishes = Wishes(
                format=options["format"],
                takes_usage=options["usage"],
                takes_alerts=least is not None,
                least_severity=(Severity.NOTICE if least is None else least).value,
            )
            return add_webhook(name=options["name"], url=options["url"], wishes=wishes, actor=ACTOR)[1]
        case "remove":
            return f"{remove_webhook(name=options['name'], actor=ACTOR).name} is removed"
        case _:
            lines = [f"{row.name}  {'active' if row.is_active else 'removed'}" for row in list_webhooks()]
            return "\n".join(lines) or "There is no webhook."


@command("explain", "Say why a request went to its node.", argument("request", metavar="REQUEST", help="its id, req_…"))
def explain(options: Options) -> str:
    return print_decision(*find_decision(options["request"]))


@command(
    "replay_routing",
    "Score the decisions of a day anew and say what other weights would have changed.",
    argument(
        "--weights",
        required=True,
        metavar="PART=W,…",
        help="load, active, latency, reliability, affinity; 0 to 1; the others as each model has them",
    ),
    argument("--model", default="", help="only requests of this model"),
    argument("--hours", type=float, default=24.0, metavar="H", help="of the last H hours; default: 24"),
)
def replay_routing(options: Options) -> str:
    weights = read_weights(options["weights"])
    return print_replay(score_anew(weights, model=options["model"], hours=options["hours"]))


@command(
    "ticket_key",
    "Replace the key that signs tickets, or list the keys. What is signed with the old one holds for some minutes.",
    argument("action", choices=["rotate", "list"]),
)
def ticket_key(options: Options) -> str:
    if options["action"] == "rotate":
        return f"{rotate_ticket_key(actor=ACTOR)} signs tickets from the next minute on"
    return "\n".join(describe_ticket_keys()) or "no node takes tickets yet"
