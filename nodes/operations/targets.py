"""The nodes that an operation is for, and what all operations on nodes have in common.

From what a person types to what is signed, and back to how the nodes are now. Parameters are brought into the one form that
is signed, and what cannot be signed is refused with the reason. A node may have said anything of itself.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from django.conf import settings
from django.db.models import Q
from django.utils.formats import number_format
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from core.limits import limits
from governance.errors import InvalidProposal
from governance.operations.runs import last_run
from governance.registry import (
    Asked,
    Brief,
    Choices,
    Description,
    Done,
    Impact,
    Line,
    NotNow,
    Request,
    RunOrder,
    Sent,
    Signer,
)
from nodes.direct import schedule_call
from nodes.errors import NodeError, NodeNotFound
from nodes.models import Node, NodeOpKey, ProviderState, Reach, clock_of, presence_of, read_clock, with_clock
from nodes.services.availability import find_node_id, judge_status, read_availability
from nodes.services.telemetry import NodeTelemetry, describe_telemetry
from nodes.states import Freshness
from wire import COMMAND
from wire.contract import NodeStatus
from wire.ids import parse_id
from wire.optoken.approval import ApprovalError, canonical

OK, CAUTION, DANGER = "ok", "caution", "danger"

Params = Mapping[str, object]
Option = tuple[str, str]
Traffic = tuple[int, int]
"""Live requests, and the tenants that they are of."""
TrafficReader = Callable[[uuid.UUID, str | None], Traffic]


@dataclass(frozen=True, slots=True)
class Target:
    """A node as an operation sees it now."""

    node: Node
    status: NodeStatus
    said: NodeTelemetry

    @property
    def loaded(self) -> set[str]:
        """Names of the models that it has loaded."""
        return {replica.model for replica in self.said.loaded}


@dataclass(frozen=True, slots=True)
class Field:
    """One parameter. ``least`` and ``most`` bound a number; None = the largest of a column."""

    kind: Literal["text", "number", "truth", "object", "numbers", "members"]
    is_required: bool = False
    least: int = 1
    most: int | None = None


class NodeOperation:
    """A governed operation on nodes. Each says its name, its parameters and its sentences.

    One that is not ``is_remote`` is carried out by the control plane itself and overrides ``carry_out``.
    """

    name: str
    title: str
    is_remote = True
    fields: Mapping[str, Field] = {}

    def clean(self, targets: Sequence[str], params: Params) -> Request:
        """Return the request with the ids that are signed as targets. Raises InvalidProposal."""
        cleaned = self.clean_params(params)
        return Request(clean_targets(targets, is_remote=self.is_remote), cleaned)

    def clean_params(self, params: Params) -> dict[str, object]:
        """Return the parameters in the form that is signed. Raises InvalidProposal."""
        return clean_params(params, self.fields)

    def describe(self, targets: Sequence[str], params: Params) -> Description:
        """Return the request in words, each parameter beside what is so today."""
        found = [target for target in map(read_target, targets) if target is not None]
        label = _("On")
        if len(targets) > 1:
            text = _("On %(count)s nodes, together") if self.is_joint(params) else _("On %(count)s nodes, one after the other")
            label = text % {"count": len(targets)}
        on = Line(label, ", ".join(targets))
        names = _list_some([name_of(target) for target in targets[: limits().nodes.listed_names]], count=len(targets))
        return Description(self.write_sentence(params, names), [on, *self.write_lines(params, found)])

    def preview(self, targets: Sequence[str], params: Params) -> Sequence[Impact]:
        """Return what it would mean for each node."""
        impacts: list[Impact] = []
        for signed in targets:
            target = read_target(signed)
            if target is None:
                impacts.append(Impact(DANGER, _("%(node)s is no node that is known here any more.") % {"node": signed}))
                continue
            if self.is_remote:
                impacts += _judge_reach(target)
            impacts += self.judge(target, params, signed)
            impacts += _judge_history(self.name, signed, params, target.node.name)
        return impacts

    def sum_up(self, asked: Sequence[Asked]) -> Sequence[Brief]:
        """Return one line for each, with one query for all of them."""
        found = find_targets({text for targets, _params in asked for text in targets})
        return [self._sum_up_one(targets, params, found) for targets, params in asked]

    def _sum_up_one(self, targets: Sequence[str], params: Params, found: Mapping[str, Target]) -> Brief:
        known = [found[text] for text in targets if text in found]
        names = _list_some([found[text].node.name if text in found else text for text in targets])
        facts = [_("%(node)s is offline") % {"node": one.node.name} for one in known if one.status is NodeStatus.OFFLINE]
        facts = facts[: limits().nodes.listed_names]
        if len(known) == 1:
            facts += self.write_briefs(known[0], params)
        elif known:
            running = sum(count_running(target, None) for target in known)
            facts.append(ngettext("%(count)s request runs there", "%(count)s requests run there", running) % {"count": running})
        return Brief(self.write_sentence(params, names), " · ".join(facts))

    def write_briefs(self, target: Target, params: Params) -> Iterator[str]:
        """Yield in a few words each what it would mean for a node. Without queries."""
        model = params.get("modelId")
        yield from brief_live(target, model if isinstance(model, str) else None)

    def find_signer(self, target: str) -> Signer | None:
        """Return the newest key of the node; None while it is away or takes no operations."""
        node = find_signed(target)
        if node is None or not node.op_level or node.runner_id != target:
            return None
        key = NodeOpKey.objects.filter(node=node, retired_at=None).order_by("-pk").first()
        return None if key is None else Signer(node.op_level, key.kid, bytes(key.secret), node.runner_id)

    def carry_out(self, order: RunOrder) -> Sent | Done | NotNow:
        """Say which node is to get it: a gateway sends it, and a task to a node that is called over HTTP."""
        node = find_signed(order.target)
        if node is None:
            return NotNow(f"{order.target} is no node that is known here", retry_s=limits().nodes.command_away_retry_s)
        if problem := explain_unready(node) or _explain_absence(node):
            return NotNow(problem, retry_s=limits().nodes.command_away_retry_s)
        if node.reach == Reach.DIRECT.value and node.agent_session is None:
            schedule_call(order.run_id)
        return Sent(node.pk)

    def is_joint(self, params: Params) -> bool:
        """Return whether the nodes carry it out together, all or none."""
        del params
        return False

    def explain_wait(self, targets: Sequence[str]) -> str:
        """Return why one of these nodes cannot be told now; "" = all can."""
        for text in targets:
            node = find_signed(text)
            if problem := "it is not known here" if node is None else explain_unready(node) or _explain_absence(node):
                return f"all nodes must be there: {problem}"
        return ""

    def write_sentence(self, params: Params, nodes: str) -> str:
        """Return what is asked for, in one sentence without a full stop. ``nodes``: their names."""
        raise NotImplementedError

    def write_lines(self, params: Params, found: Sequence[Target]) -> list[Line]:
        """Return the parameters in words. ``found``: the nodes as they are now."""
        raise NotImplementedError

    def judge(self, target: Target, params: Params, signed: str) -> Iterator[Impact]:
        """Yield what this operation means for a node. ``signed``: the node's id as it is signed."""
        raise NotImplementedError


# The nodes


def clean_targets(targets: Sequence[str], *, is_remote: bool) -> tuple[str, ...]:
    """Return the targets as they are signed: runner ids for what the nodes carry out themselves, else ids of nodes.

    Takes runner ids, node ids and names that only one node has. Raises InvalidProposal.
    """
    found: dict[str, None] = {}
    for text in targets:
        node = _find_typed(text.strip())
        if is_remote and not (node.runner_id and node.op_level):
            raise InvalidProposal(
                _(
                    "%(name)s takes no operations from here: its program must be connected with a data folder, or an "
                    "operator gives its operation key on the node's page."
                )
                % {"name": node.name},
                param="targets",
            )
        found[node.runner_id if is_remote else node.printed_id] = None
    if not 1 <= len(found) <= limits().nodes.operation_targets:
        raise InvalidProposal(
            _("Name 1 to %(operation_targets)s nodes, each by its runner id, its id or its name.")
            % {"operation_targets": limits().nodes.operation_targets},
            param="targets",
        )
    return tuple(found)


def read_target(text: str) -> Target | None:
    """Return the node of a signed target; None when there is none any more."""
    node = find_signed(text)
    return None if node is None else _make_target(node, now=read_clock())


def list_targets(runner_ids: Collection[str] | None = None) -> list[Target]:
    """Return every node that may come back, by name, in one query; ``runner_ids``: of these alone."""
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).exclude(credential__revoked_at__isnull=False)
    rows = rows if runner_ids is None else rows.filter(runner_id__in=runner_ids)
    nodes = with_clock(rows).select_related("presence").order_by("name", "pk")
    return [_make_target(node, now=clock_of(node)) for node in nodes]


def find_signed(text: str) -> Node | None:
    """Return the node whose runner id or printed id a statement holds."""
    rows = Node.objects.select_related("presence", "credential").exclude(provider__state=ProviderState.DELETED)
    by_id = parse_id("node", text) if text.startswith("node_") else None
    if by_id is not None:
        return rows.filter(pk=by_id).first()
    found = list(rows.filter(runner_id=text)) if text else []
    # Of several that ever had the id, one alone may have it now: the others' credentials are revoked.
    usable = [node for node in found if node.credential is None or node.credential.revoked_at is None]
    return max(usable or found, key=lambda node: node.updated_at, default=None)


def find_targets(texts: Collection[str]) -> dict[str, Target]:
    """Return the nodes of signed targets as ``find_signed`` finds each, in one query."""
    ids = {text: ident for text in texts if text.startswith("node_") and (ident := parse_id("node", text)) is not None}
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).filter(
        Q(pk__in=ids.values()) | Q(runner_id__in=[text for text in texts if text and text not in ids])
    )
    nodes = list(with_clock(rows).select_related("presence", "credential"))
    # Of several that ever had an id, the one that may have it now comes last, as in find_signed.
    nodes.sort(key=lambda node: (node.credential is None or node.credential.revoked_at is None, node.updated_at))
    found = {node.runner_id: node for node in nodes} | {node.printed_id: node for node in nodes}
    return {text: _make_target(found[text], now=clock_of(found[text])) for text in texts if text in found}


def name_of(text: str) -> str:
    """Return what a person calls the node of a signed target."""
    node = find_signed(text)
    return node.name if node is not None else text


def refuse_unable(targets: Sequence[str], is_able: Callable[[Node], bool], *, why: str, param: str) -> None:
    """Raise InvalidProposal naming the signed nodes that have not said that they know what is asked for."""
    unable = [node.name for node in map(find_signed, targets) if node is not None and not is_able(node)]
    if unable:
        raise InvalidProposal(
            _("%(nodes)s has not said that it can %(why)s")
            % {"nodes": ", ".join(unable[: limits().nodes.listed_names]), "why": why},
            param=param,
        )


def explain_unready(node: Node) -> str:
    """Return why a node that takes operations cannot be sent one now; "" = it can."""
    if not node.op_level:
        return f"{node.name} takes no operations from here: {node.policy_error or 'it named no level'}"
    if node.op_level == "L2" and not node.policy_version:
        return f"{node.name} has no approval policy pinned; run {COMMAND} trust on it"
    if node.clock_skew_ms is not None and abs(node.clock_skew_ms) > limits().nodes.clock_skew_ms:
        return f"the clock of {node.name} is {abs(node.clock_skew_ms) // 1000} s off; set it, then have the node reconnect"
    return ""


def _explain_absence(node: Node) -> str:
    availability = read_availability(node, now=read_clock())
    if node.agent_session is not None:  # it is told in its session, whether it can be sent requests or not
        is_away = availability.freshness is Freshness.OFFLINE
    else:
        has_way = node.reach == Reach.DIRECT.value or presence_of(node).connected
        is_away = not has_way or availability.status is NodeStatus.OFFLINE
    if is_away:
        return f"{node.name} is offline; it is told when it is back"
    return ""


def _make_target(node: Node, *, now: datetime) -> Target:
    return Target(node, judge_status(node, now=now), describe_telemetry(node, now=now))


def _find_typed(text: str) -> Node:
    # A node below L2 chooses its runner id, so what nodes are called counts first.
    try:
        return Node.objects.get(pk=find_node_id(text))
    except NodeNotFound as error:
        node = find_signed(text)
        if node is None:
            raise InvalidProposal(error.message, param="targets") from None
        return node
    except NodeError as error:
        raise InvalidProposal(error.message, param="targets") from None


# The parameters


def clean_params(params: Params, fields: Mapping[str, Field]) -> dict[str, object]:
    """Return the members that are signed; those that are null or empty text are left out. Raises InvalidProposal."""
    unknown = sorted(params.keys() - fields.keys())
    if unknown:
        known = ", ".join(fields) or "nothing"
        raise InvalidProposal(
            _("There is no parameter %(unknown)r here; it takes %(known)s.") % {"unknown": unknown[0][:60], "known": known},
            param=unknown[0][:60],
        )
    given = {name: value for name, value in params.items() if value is not None and value != ""}
    missing = [name for name, field in fields.items() if field.is_required and name not in given]
    if missing:
        raise InvalidProposal(_("%(missing)s must be given.") % {"missing": missing[0]}, param=missing[0])
    for name, field in fields.items():
        if name in given:
            _check_value(name, given[name], field)
    cleaned = {name: given[name] for name in fields if name in given}
    try:
        canonical(cleaned)
    except ApprovalError as error:
        raise InvalidProposal(_("These parameters cannot be signed: %(error)s.") % {"error": error}, param="params") from None
    return cleaned


def _check_value(name: str, value: object, field: Field) -> None:
    bounds = limits().nodes
    match field.kind:
        case "text":
            if not isinstance(value, str) or not _can_be_signed(value):
                raise InvalidProposal(
                    _("%(name)s must be printable text of at most %(most)s characters, without outer blanks.")
                    % {"name": name, "most": bounds.operation_text_chars},
                    param=name,
                )
        case "number":
            _refuse_floats(name, value)
            most = bounds.report_integer if field.most is None else field.most
            if isinstance(value, bool) or not isinstance(value, int) or not field.least <= value <= most:
                raise InvalidProposal(
                    _("%(name)s must be a whole number from %(least)s to %(most)s.")
                    % {"name": name, "least": field.least, "most": most},
                    param=name,
                )
        case "truth":
            if not isinstance(value, bool):
                raise InvalidProposal(_("%(name)s must be true or false.") % {"name": name}, param=name)
        case "numbers":
            _refuse_floats(name, value)
            _check_numbers(name, value)
        case "members":
            _check_members(name, value)
        case "object":
            if not isinstance(value, Mapping) or len(value) > bounds.operation_overrides:
                raise InvalidProposal(
                    _("%(name)s must be an object of at most %(operation_overrides)s members.")
                    % {"name": name, "operation_overrides": bounds.operation_overrides},
                    param=name,
                )
            _refuse_floats(name, value)


_MEMBER = {"node", "gpus", "address"}


def _check_members(name: str, value: object) -> None:
    for entry in value if isinstance(value, list | tuple) else [None]:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("node"), str) or entry.keys() - _MEMBER:
            raise InvalidProposal(
                _('%(name)s must be a list of nodes with their GPUs, such as {"node": "gpu1", "gpus": [0, 1]}.')
                % {"name": name},
                param=name,
            )
        _check_numbers(f"{name}.gpus", entry.get("gpus"))


def _check_numbers(name: str, value: object) -> None:
    most = limits().nodes.report_gpus - 1
    numbers = list(value) if isinstance(value, list | tuple) else []
    is_number = all(type(one) is int and 0 <= one <= most for one in numbers)
    if not numbers or not is_number or len(set(numbers)) < len(numbers):
        raise InvalidProposal(
            _("%(name)s must be a list of numbers from 0 to %(most)s, each once.") % {"name": name, "most": most},
            param=name.partition(".")[0],
        )


def _refuse_floats(name: str, value: object) -> None:
    # Fractions have several spellings, and what is signed must have one.
    if isinstance(value, float):
        raise InvalidProposal(
            _("%(name)s is %(value)s: only whole numbers can be signed. Give it in a smaller unit, or set it on the node.")
            % {"name": name, "value": value},
            param=name,
        )
    if isinstance(value, Mapping):
        for inner, each in value.items():
            _refuse_floats(f"{name}.{inner}", each)
    elif isinstance(value, list | tuple):
        for each in value:
            _refuse_floats(name, each)


def _can_be_signed(text: str) -> bool:
    return 0 < len(text) <= limits().nodes.operation_text_chars and text.isprintable() and text == text.strip()


# What the page that proposes offers


def offer(targets: list[Target], *, is_remote: bool, params: Sequence[Mapping[str, object]]) -> Choices:
    """Return nodes and parameters as the page wants them. ``is_remote``: the nodes carry it out themselves.

    Nodes that take no operations come last: choosing one is refused with what would help.
    """
    able = [each for each in targets if not is_remote or (each.node.op_level and each.node.runner_id)]
    rest = [each for each in targets if each not in able]
    offered = [(each.node.runner_id if is_remote else each.node.printed_id, _label(each, is_remote=is_remote)) for each in able]
    offered += [(each.node.printed_id, _label(each, is_remote=is_remote)) for each in rest]
    return {"targets": offered, "targets_label": _("Nodes"), "params": params}


def offer_models(places: Mapping[str, Sequence[str]], *, blank: str = "") -> dict[str, object]:
    """Return the field of a model, of those of which it is known where they are. Without any its name is typed."""
    field: dict[str, object] = {"name": "modelId", "label": _("Model")}
    if not places:
        return {**field, "help": _("No node says that it has one; write its name.")}
    return {
        **field,
        "kind": "select",
        "choices": [("", blank or _("Choose…")), *list_options(places)],
        "others": _("Another model"),
    }


def list_options(places: Mapping[str, Sequence[str]]) -> Iterator[Option]:
    """Yield the options of a list of models, each with where it is."""
    for model, where in sorted(places.items())[: limits().nodes.offered_models]:
        yield model, f"{model} ({_list_some(where)})"


def find_places(targets: Sequence[Target], *, is_available: bool = False) -> dict[str, list[str]]:
    """Return by model where it is loaded, or with ``is_available`` also where it could be. Names that can be signed alone."""
    places: dict[str, list[str]] = {}
    for target in targets:
        name = target.node.name
        said = map(str, presence_of(target.node).available_models or ()) if is_available else ()
        for model in filter(_can_be_signed, {*said, *target.loaded}):
            is_loaded = is_available and model in target.loaded
            places.setdefault(model, []).append(
                (_("loaded on %(nodes)s") if is_loaded else _("on %(nodes)s")) % {"nodes": name}
            )
    return places


def _label(target: Target, *, is_remote: bool) -> str:
    node = target.node
    state = "draining" if node.draining else "cordoned" if node.cordoned else target.status.value
    parts = [_("away") if target.status is NodeStatus.OFFLINE else state]
    if is_remote:
        parts.append(_describe_level(node))
    models = _list_some(sorted(target.loaded))
    parts.append(_("has %(models)s loaded") % {"models": models} if models else _("nothing loaded"))
    return f"{node.name}: {' · '.join(parts)}"


def _describe_level(node: Node) -> str:
    if not node.op_level or not node.runner_id:
        return _("takes no operations from here")
    if node.op_level != "L2":
        return _("%(level)s, checks a key and no approvals") % {"level": node.op_level}
    if not node.policy_version:
        return _("L2, no policy pinned")
    return _("L2 with policy version %(version)s") % {"version": node.policy_version}


def _list_some(names: Sequence[str], *, count: int | None = None) -> str:
    """Return the first few of some names, and how many more there are. ``count``: of all, where ``names`` are fewer."""
    most, count = limits().nodes.listed_names, len(names) if count is None else count
    shown = ", ".join(names[:most])
    return _("%(names)s and %(count)s more") % {"names": shown, "count": count - most} if count > most else shown


# What carrying it out would mean now


def count_running(target: Target, model: str | None) -> int:
    """Return how many requests run on the node (on ``model``; None = on any), as the node says."""
    reported = sum(replica.active for replica in target.said.loaded if model is None or replica.model == model)
    return reported if model is not None else max(reported, presence_of(target.node).active_requests)


def brief_live(target: Target, model: str | None) -> Iterator[str]:
    """Yield how many requests run, in a few words."""
    running = count_running(target, model)
    if not running:
        yield _("nothing runs there")
        return
    yield ngettext("%(count)s request runs there", "%(count)s requests run there", running) % {"count": running}


def print_memory(mb: int) -> str:
    """Return memory as a page shows it: 512 MiB, 17.5 GiB."""
    return f"{number_format(round(mb / 1024, 1), decimal_pos=1, force_grouping=True)} GiB" if mb >= 1024 else f"{mb} MiB"


def judge_live(target: Target, model: str | None, *, fate: str) -> Iterator[Impact]:
    """Yield how many requests run on the node (on ``model``; None = on any). ``fate``: a sentence, what becomes of them."""
    reported = count_running(target, model)
    # The function lives above this app, hence its name in the settings.
    read_traffic: TrafficReader | None = import_string(settings.NODE_TRAFFIC) if settings.NODE_TRAFFIC else None
    ours, tenants = read_traffic(target.node.pk, model) if read_traffic is not None else (0, 0)
    live = max(reported, ours)
    said = {"node": target.node.name, "model": model, "count": live}
    if not live:
        text = _("No request runs on %(node)s now.") if model is None else _("No request runs on %(model)s on %(node)s now.")
        yield Impact(OK, text % said)
        return
    if model is None:
        text = ngettext("%(count)s request runs on %(node)s now.", "%(count)s requests run on %(node)s now.", live)
    else:
        text = ngettext(
            "%(count)s request runs on %(model)s on %(node)s now.", "%(count)s requests run on %(model)s on %(node)s now.", live
        )
    served = ngettext("%(count)s tenant is served.", "%(count)s tenants are served.", tenants) % {"count": tenants}
    yield Impact(CAUTION, " ".join([text % said, *([served] if tenants else []), fate]))


def _judge_reach(target: Target) -> Iterator[Impact]:
    """Yield whether the node can be told at all, and what protects it."""
    node = target.node
    if target.status is NodeStatus.OFFLINE:
        text = _("%(node)s is offline. It is told when it is back, if that is before the approval runs out.")
        yield Impact(DANGER, text % {"node": node.name})
    if problem := explain_unready(node):
        yield Impact(DANGER, _("Nothing is sent for now: %(why)s.") % {"why": problem})
    elif node.op_level != "L2":
        text = _("%(node)s works at level %(level)s: it checks a key and not the approvals themselves.")
        yield Impact(CAUTION, text % {"node": node.name, "level": node.op_level})
    if node.witness_alarm:
        text = _("%(node)s contradicts the audit log: %(why)s.")
        yield Impact(DANGER, text % {"node": node.name, "why": node.witness_alarm})
    if node.policy_version and node.policy_error:
        text = _("%(node)s refused a newer policy: %(why)s.")
        yield Impact(CAUTION, text % {"node": node.name, "why": node.policy_error})
    if node.clock_skew_ms is not None and not problem and abs(node.clock_skew_ms) > limits().nodes.clock_skew_warning_ms:
        text = _("The clock of %(node)s is %(seconds)s s off.")
        yield Impact(CAUTION, text % {"node": node.name, "seconds": abs(node.clock_skew_ms) // 1000})


def _judge_history(operation: str, signed: str, params: Params, name: str) -> Iterator[Impact]:
    run = last_run(operation, target=signed, params=params)
    if run is None or run.ended_at is None:
        yield Impact(CAUTION, _("This was never done on %(node)s before.") % {"node": name})
        return
    seconds = (run.ended_at - run.dispatched_at).total_seconds() if run.dispatched_at is not None else 0.0
    said = {"node": name, "at": f"{run.ended_at:%Y-%m-%d %H:%M} UTC", "seconds": f"{seconds:.0f}", "why": run.code or run.state}
    if run.state == "succeeded" and seconds >= 1:
        yield Impact(OK, _("The last time on %(node)s, on %(at)s, it succeeded after %(seconds)s s.") % said)
    elif run.state == "succeeded":
        yield Impact(OK, _("The last time on %(node)s, on %(at)s, it succeeded.") % said)
    else:
        yield Impact(CAUTION, _("The last time on %(node)s, on %(at)s, it did not succeed (%(why)s).") % said)
