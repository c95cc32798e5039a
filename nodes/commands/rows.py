"""The rows of commands: put there by an approved operation, taken away when it has ended."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from django.db import transaction

from core.hints import publish_hint
from nodes.models import NodeCommand
from wire import clock


@dataclass(frozen=True, slots=True)
class Command:
    """What a box is to be sent. ``body``: what the model-runner API takes, without the token."""

    run_id: uuid.UUID
    node_id: uuid.UUID
    op_id: str
    use: int
    operation: str
    body: Mapping[str, object]
    token: str = field(repr=False)
    token_expires_at: datetime


@transaction.atomic
def put_command(command: Command) -> bool:
    """Have a command delivered; False when it has ended already. A new token replaces the one before.

    Putting it again is harmless: a box carries out each (op_id, use) once.
    """
    row, is_new = NodeCommand.objects.select_for_update().get_or_create(
        pk=command.run_id,
        defaults={
            "node_id": command.node_id,
            "op_id": command.op_id,
            "use": command.use,
            "operation": command.operation,
            "body": dict(command.body),
            "token": command.token,
            "token_expires_at": command.token_expires_at,
        },
    )
    if row.state == NodeCommand.State.ENDED:
        return False
    if not is_new:
        row.token, row.token_expires_at = command.token, command.token_expires_at
        row.state, row.sent_at, row.gateway_id, row.task_id = NodeCommand.State.WAITING, None, None, ""
        row.save(update_fields=["token", "token_expires_at", "state", "sent_at", "gateway_id", "task_id", "updated_at"])
    publish_hint("commands", str(command.node_id))
    return True


def park_command(row: NodeCommand) -> None:
    """Hold it back until it gets another token; a row that has got one meanwhile stays as it is."""
    same = NodeCommand.objects.filter(pk=row.pk, token=row.token).exclude(state=NodeCommand.State.ENDED)
    same.update(state=NodeCommand.State.WAITING, token="", task_id="", updated_at=clock.now())
