"""What goes between a gateway process and its nodes as questions: somebody's on a page, for a log or a hub, and the answer."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from core.db.threads import run_upkeep
from nodes.links import LinkRegistry
from nodes.links.relay import RelayLink
from nodes.models import Question
from nodes.services.hub import list_hub_questions, store_answer
from nodes.services.logs import list_log_questions, store_log
from wire import bridge

Answer = TypeVar("Answer", bound=bridge.Message)


class QuestionChannel(Generic[Answer]):
    """Questions of one kind. One per gateway process.

    ``wake`` has ``store`` called soon. ``list_questions`` returns those that wait for an answer, by node; ``write`` the message
    that asks, None = this node does not answer such a question; ``store`` writes an answer down, None = there will be none.
    """

    def __init__(
        self,
        registry: LinkRegistry,
        *,
        wake: Callable[[], None],
        list_questions: Callable[[], Mapping[uuid.UUID, Question]],
        write: Callable[[RelayLink, Question], bridge.Message | None],
        store: Callable[[uuid.UUID, uuid.UUID, Answer | None], None],
    ) -> None:
        self._registry, self._wake = registry, wake
        self._list_questions, self._write, self._store = list_questions, write, store
        self._asked: dict[uuid.UUID, uuid.UUID] = {}
        """Which question each node was sent, as long as nobody has its answer."""
        self._told: dict[uuid.UUID, Answer | None] = {}
        """What nodes answered and the database does not know yet; None = the node answers none."""

    async def ask(self) -> None:
        """Send the open questions to the nodes that are linked here. Raises DatabaseError."""
        if len(self._registry) == 0:
            return
        questions = await run_upkeep(self._list_questions)
        known = {node_id: question.query_id for node_id, question in questions.items()}
        self._asked = {node_id: asked for node_id, asked in self._asked.items() if known.get(node_id) == asked}
        for node_id, question in questions.items():
            link = self._registry.get(node_id)
            if not isinstance(link, RelayLink) or link.closed or self._asked.get(node_id) == question.query_id:
                continue
            self._asked[node_id] = question.query_id
            if (message := self._write(link, question)) is not None:
                link.send_message(message)
            else:  # it would end its session over a frame that it does not know
                self._told[node_id] = None
                self._wake()

    def take(self, link: RelayLink, query_id: str, answer: Answer) -> None:
        """Note what a node answered; what nobody asked for is dropped."""
        if query_id == str(self._asked.get(link.node_id)):
            self._told[link.node_id] = answer
            self._wake()

    async def store(self) -> None:
        """Have the answers written down. Raises DatabaseError: they are kept then."""
        for node_id, answer in list(self._told.items()):
            if (query_id := self._asked.get(node_id)) is not None:  # else it came too late
                await run_upkeep(self._store, node_id, query_id, answer)
            self._told.pop(node_id, None)


@dataclass(frozen=True, slots=True)
class Questions:
    """All kinds of them."""

    logs: QuestionChannel[bridge.LogTail]
    hubs: QuestionChannel[bridge.HubAnswer]

    async def ask(self) -> None:
        """As ``QuestionChannel.ask``."""
        await self.logs.ask()
        await self.hubs.ask()

    async def store(self) -> None:
        """As ``QuestionChannel.store``."""
        await self.logs.store()
        await self.hubs.store()


def open_questions(registry: LinkRegistry, *, wake: Callable[[], None]) -> Questions:
    """Return the channels of one gateway process."""

    def ask_log(link: RelayLink, asked: Question) -> bridge.Message | None:
        return bridge.LogQuery(query_id=str(asked.query_id)) if link.tells_log else None

    def ask_hub(link: RelayLink, asked: Question) -> bridge.Message | None:
        return bridge.HubQuery(query_id=str(asked.query_id), text=asked.text) if link.searches_hub else None

    return Questions(
        QuestionChannel(registry, wake=wake, list_questions=list_log_questions, write=ask_log, store=store_log),
        QuestionChannel(registry, wake=wake, list_questions=list_hub_questions, write=ask_hub, store=store_answer),
    )
