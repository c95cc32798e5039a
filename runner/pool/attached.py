"""The models of a server of somebody else's, offered for as long as it lists them."""

from __future__ import annotations

from collections.abc import Sequence

import aiohttp

from runner.definitions.fields import ModelDefinition
from runner.definitions.plan import LoadPlan, Progress
from runner.engines.remote import OpenAIServer
from runner.engines.supervisor import Supervisor
from runner.pool.models import Registry
from runner.queue import FairQueue


class AttachedServer:
    """Follows one server. ``queue`` is shared by its models, because its slots are; ``given``: models named by the owner.

    ``translate`` and ``tidies``: as in the definitions of its models.
    """

    def __init__(
        self, registry: Registry, queue: FairQueue, *, url: str, key: str, given: Sequence[str], slots: int, silent_s: float,
        client: aiohttp.ClientSession, translate: tuple[str, ...] = (), tidies: bool = False,
    ) -> None:  # fmt: skip
        self._registry = registry
        self._queue = queue
        self._slots = slots
        self._translate = translate
        self._tidy = True if tidies else None
        self._server = OpenAIServer(url, key=key, given=given, client=client, on_models=self._follow)
        self.supervisor = Supervisor(self._server, silent_s=silent_s, on_change=self._follow)

    def start(self) -> None:
        """Begin to follow it; a server that is not there yet is asked again and again."""
        self._follow()
        self.supervisor.keep_trying(_ignore)

    def refresh(self) -> None:
        """Have its models looked at now."""
        self.supervisor.check_soon()

    async def close(self) -> None:
        """Follow it no longer."""
        await self.supervisor.unload(gently=True)

    def _follow(self) -> None:
        wanted = self._server.models
        for model in self._registry.models:
            if model.definition.backend == "attached" and model.model_id not in wanted:
                self._registry.detach(model.model_id)
        plan = LoadPlan(model_id="", backend="attached", slots=self._slots)
        for name in wanted:
            definition = ModelDefinition(
                model_id=name, backend="attached", target_inflight=self._slots, translate=self._translate, tidy=self._tidy
            )
            self._registry.attach(definition, plan, self.supervisor, self._queue)


def _ignore(_progress: Progress) -> None:
    """Asking for a list of models has no progress to speak of."""
