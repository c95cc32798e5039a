"""What goes between a gateway process and its nodes about their logs: somebody's question there, the last lines back."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from core.db.threads import run_upkeep
from nodes.links import LinkRegistry
from nodes.links.relay import RelayLink
from nodes.services.logs import list_questions, store_log
from wire import bridge


class LogChannel:
    """One per gateway process. ``wake`` has ``store`` called soon."""

    def __init__(self, registry: LinkRegistry, *, wake: Callable[[], None]) -> None:
        self._registry, self._wake = registry, wake
        self._asked: dict[uuid.UUID, uuid.UUID] = {}
        """Which question each node was sent, as long as nobody has its answer."""
        self._told: dict[uuid.UUID, bridge.LogTail | None] = {}
        """What nodes answered and the database does not know yet; None = the node does not tell its log."""

    async def ask(self) -> None:
        """Send the open questions to the nodes that are linked here. Raises DatabaseError."""
        if len(self._registry) == 0:
            return
        questions = await run_upkeep(list_questions)
        self._asked = {node_id: asked for node_id, asked in self._asked.items() if questions.get(node_id) == asked}
        for node_id, query_id in questions.items():
            link = self._registry.get(node_id)
            if not isinstance(link, RelayLink) or link.closed or self._asked.get(node_id) == query_id:
                continue
            self._asked[node_id] = query_id
            if link.tells_log:
                link.send_message(bridge.LogQuery(query_id=str(query_id)))
            else:  # it would end its session over a frame that it does not know
                self._told[node_id] = None
                self._wake()

    def take(self, link: RelayLink, tail: bridge.LogTail) -> None:
        """Note what a node answered; what nobody asked for is dropped."""
        if tail.query_id == str(self._asked.get(link.node_id)):
            self._told[link.node_id] = tail
            self._wake()

    async def store(self) -> None:
        """Have the answers written down. Raises DatabaseError: they are kept then."""
        for node_id, tail in list(self._told.items()):
            if (query_id := self._asked.get(node_id)) is not None:  # else it came too late
                await run_upkeep(store_log, node_id, query_id, tail)
            self._told.pop(node_id, None)
