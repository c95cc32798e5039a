"""What ``GET /v1/models`` lists: which names a caller may ask for now, in OpenAI's and in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl

from core.limits import limits
from gateway.errors import BadRequest
from gateway.request.models import Catalogue
from gateway.routing import Alias, may_use
from gateway.values import Caller, ModelEntry
from nodes.links import LinkRegistry


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A name that a caller may ask for. ``created`` in Unix seconds.

    ``context_tokens``: prompt and answer together, None = not known; ``max_tokens``: the most that may be asked for.
    ``targets``: of an alias, the models that can answer now, the one with the largest share first.
    """

    name: str
    created: int
    owned_by: str
    max_tokens: int
    context_tokens: int | None
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """A part of a list. ``has_more``: in the direction in which the client pages."""

    models: Sequence[ListedModel]
    has_more: bool


class ModelList:
    """The models that are allowed and that nodes serve, and the aliases that lead to one, by caller."""

    def __init__(self, catalogue: Catalogue, registry: LinkRegistry) -> None:
        self._catalogue = catalogue
        self._registry = registry

    def read(self, caller: Caller | None) -> list[ListedModel]:
        """Return what a caller may ask for, by name; None = anybody, who sees no tenant's aliases. An alias hides a model."""
        aliases = self._catalogue.aliases_for(caller.tenant if caller is not None else "")
        allowed = caller.allowed_models if caller is not None else frozenset()
        served = self._read_served()
        plain = (entry for name, entry in served.items() if name not in aliases and may_use(allowed, name, via=name))
        listed = [self._describe(entry) for entry in plain]
        for alias in aliases.values():
            behind = [target.model for target in alias.by_weight if target.model in served]
            usable = [served[model] for model in behind if may_use(allowed, model, via=alias.name)]
            if usable:
                listed.append(self._describe_alias(alias, usable))
        return sorted(listed, key=lambda model: model.name)

    def find(self, caller: Caller | None, name: str) -> ListedModel | None:
        """Return the one of that name; None when the caller cannot ask for it now."""
        return next((model for model in self.read(caller) if model.name == name), None)

    def _read_served(self) -> dict[str, ModelEntry]:
        entries = (self._catalogue.models.get(name) for name in self._registry.served_models())
        return {entry.name: entry for entry in entries if entry is not None and entry.allowed}

    def _describe(self, entry: ModelEntry) -> ListedModel:
        context = entry.context_tokens if entry.context_tokens is not None else self._read_context(entry.name)
        return ListedModel(
            name=entry.name,
            created=entry.created,
            owned_by=entry.owned_by,
            max_tokens=entry.max_tokens if context is None else min(entry.max_tokens, context),
            context_tokens=context,
        )

    def _read_context(self, name: str) -> int | None:
        # A request may go to any of them, so the smallest counts.
        contexts = (link.context_of(name) for link in self._registry.links_for(name))
        return min((context for context in contexts if context is not None), default=None)

    def _describe_alias(self, alias: Alias, usable: Sequence[ModelEntry]) -> ListedModel:
        # By the least that any of its models can do, whichever answers.
        models = [self._describe(entry) for entry in usable]
        contexts = [model.context_tokens for model in models if model.context_tokens is not None]
        return ListedModel(
            name=alias.name,
            created=alias.created,
            owned_by="alias",
            max_tokens=min(model.max_tokens for model in models),
            context_tokens=min(contexts) if contexts else None,
            targets=tuple(model.name for model in models),
        )


def cut_page(models: Sequence[ListedModel], query: bytes) -> Page:
    """Return the part of a list, sorted by name, that Anthropic's ``limit``, ``after_id`` and ``before_id`` ask for.

    An id that is not in the list (any more) marks the place where it would stand. Raises BadRequest, which names the parameter.
    """
    try:
        given = dict(parse_qsl(query.decode("latin-1"), max_num_fields=limits().gateway.list_parameters))
    except ValueError:
        raise BadRequest(f"Send at most {limits().gateway.list_parameters} parameters.") from None
    limit = _read_limit(given.get("limit"))
    after, before = given.get("after_id"), given.get("before_id")
    if after is not None and before is not None:
        raise BadRequest("Send after_id or before_id, not both.", param="before_id")
    if before is not None:
        earlier = [model for model in models if model.name < before]
        return Page(earlier[-limit:], len(earlier) > limit)
    later = models if after is None else [model for model in models if model.name > after]
    return Page(later[:limit], len(later) > limit)


def _read_limit(text: str | None) -> int:
    if text is None:
        return limits().gateway.list_rows
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= limits().gateway.list_rows):
        raise BadRequest(f"limit must be a whole number from 1 to {limits().gateway.list_rows}.", param="limit")
    return int(text)


def render_openai(model: ListedModel) -> dict[str, object]:
    # What it has beyond OpenAI's members, clients that do not know it pass over.
    shown: dict[str, object] = {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": model.owned_by,
        "max_output_tokens": model.max_tokens,
    }
    if model.context_tokens is not None:
        shown["context_window"] = model.context_tokens
    if model.targets:
        shown["x_muster"] = {"targets": model.targets}
    return shown


def render_anthropic(model: ListedModel) -> dict[str, object]:
    shown: dict[str, object] = {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_tokens": model.max_tokens,
    }
    if model.context_tokens is not None:
        shown["max_input_tokens"] = model.context_tokens
    if model.targets:
        shown["x_muster"] = {"targets": model.targets}
    return shown


def render_page(page: Page) -> dict[str, object]:
    names = [model.name for model in page.models]
    return {
        "data": [render_anthropic(model) for model in page.models],
        "has_more": page.has_more,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }
