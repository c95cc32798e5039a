"""A box at the edge of governance: an operation that is sent and answered by events, which tests bring in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from django.conf import settings as django_settings
from django.test import override_settings

from governance import services
from governance.models import Operation
from governance.registry import Description, Done, Impact, NotNow, Request, RunOrder, Sent, Signer, find_kind
from tests.system.governance.team import Member

NAME = "model-load"
"""It stands in the place of this operation, which the default policy has in the classes model-load, standing, break-glass."""


class FakeBox:
    """Boxes named by targets. Those in ``away`` have no signer, in ``busy`` answer not now, in ``local`` do it at once.

    ``sent``: every order that was taken. ``broken``: targets at which carrying out raises, as a mistake of ours would.
    ``watch`` sees an order at the moment at which it is sent.
    """

    name = NAME
    title = "Load a model"
    is_remote = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.away: set[str] = set()
        self.busy: set[str] = set()
        self.local: set[str] = set()
        self.broken: set[str] = set()
        self.sent: list[RunOrder] = []
        self.watch: Callable[[RunOrder], None] = lambda order: None

    def clean(self, targets: Sequence[str], params: Mapping[str, object]) -> Request:
        """Take anything."""
        return Request(tuple(targets), dict(params))

    def describe(self, targets: Sequence[str], params: Mapping[str, object]) -> Description:
        """Name the targets."""
        del params
        return Description(f"Load on {', '.join(targets)}", [])

    def preview(self, targets: Sequence[str], params: Mapping[str, object]) -> Sequence[Impact]:
        """Return nothing."""
        del targets, params
        return ()

    def find_signer(self, target: str) -> Signer | None:
        """Return a key of level 2."""
        return None if target in self.away else Signer("L2", "k1", b"k" * 32, target)

    def carry_out(self, order: RunOrder) -> Sent | Done | NotNow:
        """Note the order."""
        if order.target in self.broken:
            raise LookupError("a mistake of ours")
        if order.target in self.busy:
            return NotNow(f"{order.target} is busy")
        self.watch(order)
        self.sent.append(order)
        return Done("done at once") if order.target in self.local else Sent()


BOX = FakeBox()


@contextmanager
def fake_boxes() -> Iterator[FakeBox]:
    """Put the fake in the place of the operation."""
    BOX.reset()
    operations = {**django_settings.OPERATIONS, NAME: f"{__name__}.BOX"}
    with override_settings(OPERATIONS=operations):
        find_kind.cache_clear()
        try:
            yield BOX
        finally:
            find_kind.cache_clear()


def propose_load(member: Member, *targets: str, **changes: object) -> Operation:
    """Ask for a load on boxes."""
    asked: dict[str, object] = {
        "operation": NAME, "targets": targets or ("box-a",), "params": {"modelId": "m"}, "reason": "for the demo",
        "proposer": member.proposer,
    }  # fmt: skip
    return services.propose(**(asked | changes))  # type: ignore[arg-type]
