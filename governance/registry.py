"""What can be governed, and who does it: ``settings.OPERATIONS`` names an object for every operation, which carries it out.

Governance knows rules, proof and record; what an operation means is told here by the app it belongs to.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol, Self, cast, runtime_checkable
from urllib.parse import urlencode

from django.conf import settings
from django.utils.module_loading import import_string
from django.utils.translation import gettext_lazy as _

from governance.errors import UnknownOperation
from governance.models import Alert
from governance.states import Severity


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a statement in words. ``now``: what it is today, where that can be compared; "" = nothing to compare."""

    label: str
    value: str
    now: str = ""


@dataclass(frozen=True, slots=True)
class Description:
    """A statement in plain words: what an approver reads. ``title`` is a sentence without a full stop."""

    title: str
    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """GPU memory of a node in MiB, as it is and as it would be.

    ``freed_mb``: of what goes first; ``needed_mb``: of what comes, None = nobody has measured it.
    """

    node: str
    total_mb: int
    used_mb: int
    freed_mb: int
    needed_mb: int | None

    @property
    def kept_mb(self) -> int:
        """What stays in use."""
        return max(0, self.used_mb - self.freed_mb)

    @property
    def then_mb(self) -> int | None:
        """What would be in use; None = not known."""
        return None if self.needed_mb is None else self.kept_mb + self.needed_mb

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None = not known."""
        return None if self.then_mb is None else self.then_mb <= self.total_mb


@dataclass(frozen=True, slots=True)
class Impact:
    """What carrying it out would mean now. ``level``: ok, caution or danger; ``text``: one plain sentence."""

    level: str
    text: str
    memory: MemoryChange | None = None


@dataclass(frozen=True, slots=True)
class Brief:
    """An operation in a list. ``title``: as in its description; ``impact``: what it would mean now, in one line."""

    title: str
    impact: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """What somebody asks for, checked and brought into the form that is signed."""

    targets: tuple[str, ...]
    params: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class RunOrder:
    """One carrying out. ``token`` is empty for operations of the control plane itself. ``op_id``: as in the statement."""

    run_id: uuid.UUID
    op_id: str
    use: int
    operation: str
    target: str
    params: Mapping[str, object]
    token: str = field(repr=False)
    token_expires_at: int
    requested_by: str
    approved_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sent:
    """It goes to a node with its token; the end is told by ``governance.operations.runs.finish_run``."""

    node_id: uuid.UUID


@dataclass(frozen=True, slots=True)
class Done:
    """It was carried out at once, in the transaction of the caller."""

    message: str = ""
    result: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NotNow:
    """It cannot be sent at the moment (the node is away): the run stays queued and is tried again."""

    reason: str
    retry_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Signer:
    """How a token for a target is signed. ``level``: that of the node, L0, L1 or L2; ``audience``: its runner id."""

    level: str
    kid: str
    key: bytes = field(repr=False)
    audience: str


class OperationKind(Protocol):
    """One governed operation. Methods raise GovernanceError; any other error is a mistake, and the run is tried again later."""

    name: str
    """As in ``settings.OPERATIONS`` and in the policy."""
    title: str
    """For people, such as "Load a model"."""
    is_remote: bool
    """Whether a node carries it out, which needs a token."""

    def clean(self, targets: Sequence[str], params: Mapping[str, object]) -> Request:
        """Return the request in the one form that is signed. Raises InvalidProposal naming the field at fault."""

    def describe(self, targets: Sequence[str], params: Mapping[str, object]) -> Description:
        """Return the request in words, each changed value beside the one of today. Never raises for a stored request."""

    def preview(self, targets: Sequence[str], params: Mapping[str, object]) -> Sequence[Impact]:
        """Return what carrying it out now would mean: evictions, memory, live streams and tenants. Never raises."""

    def find_signer(self, target: str) -> Signer | None:
        """Return how tokens for ``target`` are signed; None when it takes none at the moment. Not called when not remote."""

    def carry_out(self, order: RunOrder) -> Sent | Done | NotNow:
        """Do it, or send it on its way. Runs in a transaction; must not wait for a node. Sending twice must do no harm."""


Choices = Mapping[str, object]
"""``{"targets": [(value, label)…], "params": [field…]}``. No ``targets``, or None: named by hand; empty: nothing to choose.

``"targets_label"`` says what they are, such as "Nodes".

A field is {"name", "label"} and, where it needs them: "kind" (text, number, checkbox, select, json, list); "choices"
[(value, label)…] of a select, and "others", the label of a text field beside it for what is not in the list; "min" and "max"
of a number; "initial" of a checkbox (True = checked at first); "help", one sentence; "required" (False = may be left out);
"is_rare" (True = folded away at first).
"""


@runtime_checkable
class OffersChoices(Protocol):
    """A kind that says what can be chosen, so that the page that proposes has a field for everything. Optional."""

    def choices(self) -> Choices:
        """Return what can be chosen now. Reads only; ``clean`` decides, whatever was offered. Never raises."""


@runtime_checkable
class JoinsTargets(Protocol):
    """A kind whose targets may carry out one thing together: they are told at once, all or none. Optional."""

    def is_joint(self, params: Mapping[str, object]) -> bool:
        """Return whether they do. Never raises."""

    def explain_wait(self, targets: Sequence[str]) -> str:
        """Return why they cannot all be told now; "" = they can. Reads only."""


Asked = tuple[Sequence[str], Mapping[str, object]]
"""Targets and parameters of one operation."""


@runtime_checkable
class SumsUp(Protocol):
    """A kind that can say what many of its operations are with as many queries as for one. Optional."""

    def sum_up(self, asked: Sequence[Asked]) -> Sequence[Brief]:
        """Return one line for each, in their order. Reads only. Never raises for stored requests."""


def make_query(operation: str, targets: Sequence[str], params: Mapping[str, object], *, op_class: str = "") -> str:
    """Return the query of the page that proposes which asks for the same once more."""
    fields = [("operation", operation), *(("target", target) for target in targets)]
    if op_class and op_class != operation:
        fields.append(("op_class", op_class))
    return urlencode([*fields, *((name, _as_text(value)) for name, value in params.items())])


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else ""
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True, slots=True)
class Undone:
    """Something that an operation has brought about and that is not so any more. ``again``: query of the page that proposes."""

    text: str
    again: str


@runtime_checkable
class FindsUndone(Protocol):
    """A kind whose work can come undone without an operation, such as by a restart. Optional."""

    def find_undone(self, op_id: uuid.UUID) -> Sequence[Undone]:
        """Return what of this operation's work is not so any more. Reads only. Never raises."""


@cache
def find_kind(name: str) -> OperationKind:
    """Return the operation of that name. Raises UnknownOperation."""
    path = settings.OPERATIONS.get(name)
    if path is None:
        known = ", ".join(sorted(settings.OPERATIONS))
        raise UnknownOperation(f"There is no operation {name[:60]!r}. There are: {known}.", param="operation")
    return cast("OperationKind", import_string(path))  # a test sees to it that each is one


# What the package above says of alerts


SEVERITY_LABELS = {Severity.DOWN: _("down"), Severity.IMPAIRED: _("impaired"), Severity.NOTICE: _("notice")}


@dataclass(frozen=True, slots=True)
class Links:
    """Where an alert leads. ``fix``: what the link to ``fix_url`` is called. Empty addresses = there is no such page."""

    object_url: str = ""
    fix: str = ""
    fix_url: str = ""


@dataclass(frozen=True, slots=True)
class AlertFacts:
    """What words are made of: the columns of an alert."""

    kind: str
    code: str
    object_type: str
    object_id: str
    object_name: str
    params: Mapping[str, object]

    @classmethod
    def of(cls, row: Alert) -> Self:
        return cls(row.kind, row.code, row.object_type, row.object_id, row.object_name, row.params)


class AlertWords(Protocol):
    """What the package above says of alerts; ``settings.GOVERNANCE_ALERT_WORDS`` names it."""

    def describe(self, alert: AlertFacts) -> tuple[str, str]:
        """Return what was seen and what to do, in the language that is active."""

    def list_kinds(self) -> Iterable[str]:
        """Return every kind there is."""

    def name_kind(self, kind: str) -> str:
        """Return what a kind is called, in a few words."""

    def find_links(self, alert: AlertFacts) -> Links:
        """Return where pages lead from it."""


def load_words() -> AlertWords:
    """Return what ``settings.GOVERNANCE_ALERT_WORDS`` names."""
    return cast("AlertWords", import_string(settings.GOVERNANCE_ALERT_WORDS))
