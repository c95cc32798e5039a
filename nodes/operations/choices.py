"""What the page that proposes offers for operations on boxes: the boxes as they are now, their models, the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from core.limits import limits
from governance.registry import Choices
from nodes.models import Node, ProviderState, clock_of, with_clock
from nodes.operations.params import KEEP, SCOPES
from nodes.operations.targets import Target
from nodes.services.availability import judge_status
from nodes.services.telemetry import describe_box
from wire.contract import NodeStatus

_SCOPE_LABELS = {"all": "everything", "model": "one model", "tenant": "one tenant", "tag": "what carries a tag"}

Option = tuple[str, str]


def list_boxes() -> list[Target]:
    """Return every box that may come back, by name, in one query."""
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).exclude(credential__revoked_at__isnull=False)
    nodes = with_clock(rows).select_related("presence").order_by("name", "pk")
    return [
        Target(node, judge_status(node, getattr(node, "presence", None), now=now), describe_box(node, now=now))
        for node, now in ((node, clock_of(node)) for node in nodes)
    ]


def offer(boxes: list[Target], *, is_remote: bool, params: Sequence[Mapping[str, object]]) -> Choices:
    """Return boxes and parameters as the page wants them. ``is_remote``: the boxes carry it out themselves.

    Boxes that take no operations come last: choosing one is refused with what would help.
    """
    able = [box for box in boxes if not is_remote or (box.node.op_level and box.node.runner_id)]
    rest = [box for box in boxes if box not in able]
    offered = [(box.node.runner_id if is_remote else box.node.printed_id, _label(box, is_remote=is_remote)) for box in able]
    offered += [(box.node.printed_id, _label(box, is_remote=is_remote)) for box in rest]
    return {"targets": offered, "targets_label": "Nodes", "params": params}


def load_choices(boxes: list[Target]) -> Choices:
    """Return what a load offers: what the boxes could load, and what has to go for it."""
    places: dict[str, list[str]] = {}
    for box in boxes:
        for name in _available(box):
            places.setdefault(name, []).append(f"loaded on {box.node.name}" if name in box.loaded else f"on {box.node.name}")
    model = {**_offer_models(places), "help": "Models found on the nodes, or type a name."}
    limits = [
        {"name": "maxContextLength", "label": "Context length in tokens", "kind": "number", "min": 1, "required": False,
         "is_rare": True, "help": "Empty: as the node is set up."},
        {"name": "gpuMemoryBudgetMB", "label": "GPU memory that it may take, in MiB", "kind": "number", "min": 1,
         "required": False, "is_rare": True, "help": "Empty: what it needs."},
        {"name": "quantization", "label": "Quantization", "required": False, "is_rare": True,
         "help": "Empty: as the node is set up."},
        {"name": "overrides", "label": "Settings of the engine", "kind": "json", "required": False, "is_rare": True,
         "help": 'A JSON object, such as {"n_gpu_layers": 20}. Whole numbers only.'},
    ]  # fmt: skip
    keep = {
        "name": KEEP, "label": "Keep it loaded", "kind": "checkbox", "required": False,
        "initial": any(box.node.keeps_models for box in boxes),
        "help": "The node loads it again by itself after every restart, until an unload is approved. Approvers sign this.",
    }  # fmt: skip
    return offer(boxes, is_remote=True, params=[model, keep, _offer_eviction(boxes), *limits])


def unload_choices(boxes: list[Target]) -> Choices:
    """Return what an unload offers: what is loaded, and whether to wait for what runs."""
    force = {
        "name": "force", "label": "By force: requests that run are cut off", "kind": "checkbox", "required": False,
        "help": "Otherwise they may finish within the node's own limit.",
    }  # fmt: skip
    return offer(boxes, is_remote=True, params=[_offer_models(_loaded_places(boxes)), force])


def flush_choices(boxes: list[Target]) -> Choices:
    """Return what a flush offers: its scope, and the names that a scope needs."""
    scopes: list[Option] = [("", "Choose…"), *((scope, _SCOPE_LABELS[scope]) for scope in reversed(SCOPES))]
    params: list[Mapping[str, object]] = [
        {"name": "scope", "label": "What to flush", "kind": "select", "choices": scopes},
        {
            **_offer_models(_loaded_places(boxes), blank="any"),
            "required": False,
            "help": "Needed for one model; narrows a tenant or a tag.",
        },
        {"name": "tenantId", "label": "Tenant", "required": False, "help": "Needed for one tenant; narrows a tag."},
        {"name": "tag", "label": "Tag", "required": False, "help": "Needed for what carries a tag."},
    ]
    return offer(boxes, is_remote=True, params=params)


def reload_choices(boxes: list[Target]) -> Choices:
    """Return what a reload of the settings offers: it has no parameters."""
    return offer(boxes, is_remote=True, params=[])


def _label(box: Target, *, is_remote: bool) -> str:
    words = [_state(box)]
    if is_remote:
        words.append(_level(box.node))
    loaded = sorted(box.loaded)
    beyond = f" and {len(loaded) - limits().nodes.listed_names} more" if len(loaded) > limits().nodes.listed_names else ""
    words.append(f"has {', '.join(loaded[: limits().nodes.listed_names])}{beyond} loaded" if loaded else "nothing loaded")
    return f"{box.node.name}: {' · '.join(words)}"


def _state(box: Target) -> str:
    if box.status is NodeStatus.OFFLINE:
        return "away"
    return "draining" if box.node.draining else "cordoned" if box.node.cordoned else box.status.value


def _level(node: Node) -> str:
    if not node.op_level or not node.runner_id:
        return "takes no operations from here"
    if node.op_level != "L2":
        return f"{node.op_level}, checks a key and no approvals"
    return f"L2 with policy version {node.policy_version}" if node.policy_version else "L2, no policy pinned"


def _available(box: Target) -> set[str]:
    said = box.presence.available_models if box.presence is not None else ()
    return {name for name in (*map(str, said or ()), *box.loaded) if _can_be_signed(name)}


def _loaded_places(boxes: list[Target]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for box in boxes:
        for model in filter(_can_be_signed, box.loaded):
            places.setdefault(model, []).append(f"on {box.node.name}")
    return places


def _can_be_signed(name: str) -> bool:
    return 0 < len(name) <= limits().nodes.operation_text_chars and name.isprintable() and name == name.strip()


def _offer_models(places: dict[str, list[str]], *, blank: str = "Choose…") -> dict[str, object]:
    """Return the field of a model. Without any that is known its name is typed."""
    field: dict[str, object] = {"name": "modelId", "label": "Model"}
    if not places:
        return {**field, "help": "No node says that it has one; write its name."}
    return {**field, "kind": "select", "choices": [("", blank), *_name_places(places)], "others": "Another model"}


def _offer_eviction(boxes: list[Target]) -> dict[str, object]:
    field: dict[str, object] = {"name": "evictModel", "label": "Replace (unload first)", "required": False}
    places = _loaded_places(boxes)
    if not places:
        return {**field, "help": "Nothing is loaded at the moment."}
    return {**field, "kind": "select", "choices": [("", "nothing"), *_name_places(places)]}


def _name_places(places: dict[str, list[str]]) -> Iterator[Option]:
    for model, where in sorted(places.items())[: limits().nodes.offered_models]:
        beyond = f" and {len(where) - limits().nodes.listed_names} more" if len(where) > limits().nodes.listed_names else ""
        yield model, f"{model} ({', '.join(where[: limits().nodes.listed_names])}{beyond})"
