"""Who can be reached from this process. Dies with the process; the rows in PostgreSQL are the truth about nodes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Counter

from core.limits import limits
from nodes.links.ejections import Ejections
from nodes.links.port import EndKind, Link, Listener
from nodes.states import CONTINUATIONS, TOKENIZE
from wire import clock

EJECTIONS = Counter("muster_node_ejections_total", "Times a node was held back for how it answered", ["reason"])


class LinkRegistry:
    """All links of this gateway, by node and by model. One link a node: a newer session replaces the older."""

    def __init__(self) -> None:
        self._links: dict[uuid.UUID, Link] = {}
        self._by_model: dict[str, list[Link]] = {}
        self._answering: dict[tuple[str, tuple[str, ...]], list[Link]] = {}
        """Links by model and API paths, worked out when first asked for after a change."""
        self._listeners: list[Listener] = []
        self.ejections = Ejections(self.links_for)
        self.ejections.on_eject = lambda ejection: EJECTIONS.labels(ejection.fault.value).inc()

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._links.values()))

    def __len__(self) -> int:
        return len(self._links)

    def subscribe(self, listener: Listener) -> None:
        """Have ``listener`` called after every change that may let work be placed."""
        self._listeners.append(listener)

    def get(self, node_id: uuid.UUID) -> Link | None:
        return self._links.get(node_id)

    def links_for(self, model: str) -> Sequence[Link]:
        """Return the links whose nodes declare ``model``."""
        return self._by_model.get(model, ())

    def links_answering(self, model: str, paths: tuple[str, ...]) -> Sequence[Link]:
        """Return the links whose nodes can be asked for ``model`` on one of some API paths."""
        key = (model, paths)
        found = self._answering.get(key)
        if found is None:
            declaring = self._by_model.get(model)
            if not declaring:
                return ()  # not kept: clients choose such names
            found = self._answering[key] = [link for link in declaring if link.find_path(model, paths) is not None]
        return found

    def endpoints_of(self, model: str) -> list[str]:
        """Return the API paths on which nodes say that they answer clients of the model; empty when none says anything."""
        return sorted(
            {path for link in self.links_for(model) for path in link.endpoints.get(model, ())} - {TOKENIZE, CONTINUATIONS}
        )

    def note_unspoken(self, link: Link, model: str, endpoint: str) -> None:
        """Remember for a while that a node does not know a path on which it was asked for a model; engines are updated."""
        link.unspoken[model, endpoint] = clock.monotonic() + limits().nodes.unspoken_s
        self._answering.clear()

    def served_models(self) -> list[str]:
        return sorted(self._by_model)

    def add(self, link: Link) -> None:
        """Add a link; the one it replaces is closed and its streams end as lost."""
        old = self._links.get(link.node_id)
        if old is not None and old is not link:
            self.remove(old)
            old.close("replaced by a newer session of the same node")
        self._links[link.node_id] = link
        self.ejections.note_connect(link.node_id, clock.monotonic())
        self._index(link)
        self.announce(link)

    def remove(self, link: Link, message: str = "the connection to the node was lost") -> None:
        """Forget a link; its open streams end as lost. Harmless when it was replaced already."""
        link.closed = True
        if self._links.get(link.node_id) is link:
            del self._links[link.node_id]
            self._unindex(link)
        link.end_streams(EndKind.LINK_LOST, message)
        self.announce(None)

    def update_models(self, link: Link, models: frozenset[str], endpoints: Mapping[str, frozenset[str]] | None = None) -> None:
        """Replace what a node declares; work waiting for it may start at once. ``endpoints`` None leaves them as they are."""
        is_current = self._links.get(link.node_id) is link
        if is_current:
            self._unindex(link)
        link.models = models
        link.unspoken.clear()
        link.replicas = {model: number for model, number in link.replicas.items() if model in models}
        if endpoints is not None:
            link.endpoints = endpoints
        if is_current:
            self._index(link)
            self.announce(link)

    def exclude(self, link: Link, models: frozenset[str]) -> None:
        """Send a node nothing for these models, whatever it has loaded."""
        if link.excluded == models:
            return
        is_current = self._links.get(link.node_id) is link
        if is_current:
            self._unindex(link)
        link.excluded = models
        if is_current:
            self._index(link)
            self.announce(link)

    def announce(self, link: Link | None) -> None:
        """Tell the listeners that ``link`` (or, with None, anything) may have changed."""
        for listener in self._listeners:
            listener(link)

    def _index(self, link: Link) -> None:
        self._answering.clear()
        self.ejections.note_change()
        for model in link.models - link.excluded:
            self._by_model.setdefault(model, []).append(link)

    def _unindex(self, link: Link) -> None:
        self._answering.clear()
        self.ejections.note_change()
        for model in link.models:
            peers = self._by_model.get(model)
            if peers is not None and link in peers:
                peers.remove(link)
                if not peers:
                    del self._by_model[model]
