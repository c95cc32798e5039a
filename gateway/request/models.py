"""Which models may answer a caller: in-memory copies of keys, models and aliases, so that the request path asks no database.

Filled from the rows, refreshed when a hint arrives and by a sweep every two seconds; a revoked key therefore stops
working everywhere within five seconds, also when every hint is lost.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

import msgspec
from django.db import connection
from django.db.models import BigIntegerField, Q
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now
from django.utils import timezone

from core.limits import GatewayLimits
from gateway.errors import GatewayError, MaxTokensTooLarge, ModelNotAllowed, ModelUnknown, PromptTooLarge
from gateway.models import ApiKey, Model, ModelAlias
from gateway.routing import AUTO, Alias, Target, may_use, resolve
from gateway.values import (
    MILLION,
    Budget,
    Caller,
    InferenceRequest,
    ModelEntry,
    OwnedBudget,
    PoolOptions,
    Price,
    Priority,
    Weights,
)
from nodes.services.sessions import NODE_VERSIONS

logger = logging.getLogger("muster.gateway")


# A number beyond the newest transaction came with a restored dump from another server: no change of this one.
_CHANGED = """
WITH newest AS (SELECT pg_snapshot_xmax(pg_current_snapshot()) AS below)
SELECT key.id FROM newest, gateway_apikey AS key WHERE key.changed_in >= %s::xid8 AND key.changed_in < newest.below
 UNION
SELECT key.id FROM newest, gateway_tenant AS tenant JOIN gateway_apikey AS key ON key.tenant_id = tenant.id
 WHERE tenant.changed_in >= %s::xid8 AND tenant.changed_in < newest.below
"""

_MODEL_VERSION = "hashtextextended(concat_ws(' ', gateway_model.ctid, gateway_model.xmin), 0)"

# The sum over a table is another number when a row was written, made or deleted: place and writer of a row name its version.
_MARKS = f"""
SELECT pg_snapshot_xmin(pg_current_snapshot())::text,
       EXISTS ({_CHANGED.replace("%s", "%(since)s")}),
       (SELECT sum({_MODEL_VERSION}) FROM gateway_model),
       (SELECT sum(hashtextextended(concat_ws(' ', alias.ctid, alias.xmin, tenant.ctid, tenant.xmin), 0))
          FROM gateway_modelalias AS alias LEFT JOIN gateway_tenant AS tenant ON tenant.id = alias.tenant_id),
       (SELECT sum(version) FROM ({NODE_VERSIONS}) AS node),
       (SELECT sum(hashtextextended(concat_ws(' ', ctid, xmin), 0)) FROM nodes_ticketkey),
       (SELECT sum(hashtextextended(concat_ws(' ', ctid, xmin), 0)) FROM nodes_nodeauthority),
       ARRAY(SELECT id FROM nodes_nodecredential WHERE id = ANY(%(credentials)s) AND revoked_at IS NOT NULL),
       others.ids, others.urls
  FROM (SELECT array_agg(id) AS ids, array_agg(internal_url) AS urls FROM gateway_gatewayprocess
         WHERE stopped_at IS NULL AND id <> %(gateway)s
           AND heartbeat_at >= statement_timestamp() - make_interval(secs => %(dead_s)s)) AS others
"""  # noqa: S608  # constants


@dataclass(frozen=True, slots=True)
class Marks:
    """What one look at the database says: which tables are to be read again, and the little that is read each time.

    Those without a text are equal in two looks when nothing of the table changed between them, but for the presence of nodes on
    the sockets of the asking gateway. ``models`` and ``nodes`` are the sums of the versions of rows.
    """

    since: int
    """For the next look, and for ``load_keys``: what is committed after this one has a number that is not smaller.

    It is the oldest transaction under way, so that one which commits late is seen too. It only grows, unless the database was
    replaced by another.
    """
    has_new_keys: bool
    models: object
    aliases: object
    nodes: object
    ticket_keys: object
    authorities: object
    revoked: frozenset[int]
    """Those of the credentials in use that were revoked."""
    others: dict[uuid.UUID, str]
    """Internal URLs of the other gateways that are alive, by id."""


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A client key as the request path needs it. ``expires_at`` in Unix seconds."""

    digest: bytes
    caller: Caller
    revoked: bool
    expires_at: float | None
    is_keyless: bool = False
    """Whether requests without a key are its own."""

    def is_usable(self, now: float) -> bool:
        return not self.revoked and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True)
class AliasEntry:
    """An alias that is switched on. ``tenant`` None = for everybody. Without targets when its row cannot be read."""

    tenant: str | None
    alias: Alias


class Catalogue:
    """Keys by key id, models by name, aliases by tenant. ``apply_*`` runs on the event loop, ``load_*`` in a thread."""

    def __init__(self, limits: GatewayLimits) -> None:
        self._limits = limits
        self.version = 0
        """Another one whenever keys, models or aliases were loaded."""
        self.keys: dict[str, KeyEntry] = {}
        self.keyless: KeyEntry | None = None
        """The key whose own requests without a key are; it may be revoked."""
        self.models: dict[str, ModelEntry] = {}
        self.weights: dict[str, Weights] = {}
        """Of the parts of scores, by the models that have their own; always this dictionary."""
        self._alias_entries: list[AliasEntry] = []
        self._shared_aliases: dict[str, Alias] = {}
        self._aliases_by_tenant: dict[str, dict[str, Alias]] = {}

    def aliases_for(self, tenant: str) -> Mapping[str, Alias]:
        """Return the aliases of a tenant by name, those for everybody among them; its own wins over one of the same name."""
        return self._aliases_by_tenant.get(tenant, self._shared_aliases)

    def load_keys(self, since: int | None) -> list[tuple[str, KeyEntry]]:
        """Return the keys changed since that mark (None = all that did not end long ago); tenants are part of their keys."""
        query = ApiKey.objects.select_related("tenant")
        if since is None:
            long_ago = Now() - timedelta(seconds=self._limits.ended_key_s)
            query = query.exclude(Q(revoked_at__lt=long_ago) | Q(expires_at__lt=long_ago))
        else:
            query = query.filter(pk__in=RawSQL(_CHANGED, [str(since), str(since)]))  # noqa: S611 - a constant and parameters
        return [(key.keyid, self._key_entry(key)) for key in query]

    def load_named_keys(self, key_ids: Collection[uuid.UUID], *, tenants: Collection[str]) -> list[tuple[str, KeyEntry]]:
        """Return the keys of these ids, and those of these tenants."""
        wanted = Q(pk__in=key_ids) if key_ids else Q()
        if tenants:
            wanted |= Q(tenant__name__in=tenants)
        return [(key.keyid, self._key_entry(key)) for key in ApiKey.objects.select_related("tenant").filter(wanted)]

    def load_key(self, keyid: str) -> KeyEntry | None:
        key = ApiKey.objects.select_related("tenant").filter(keyid=keyid).first()
        return self._key_entry(key) if key is not None else None

    def load_models(self, names: Collection[str] | None = None) -> list[ModelEntry]:
        """Return the models of these names (None = all)."""
        limits = self._limits
        query = Model.objects.annotate(version=RawSQL(_MODEL_VERSION, (), BigIntegerField()))  # noqa: S611 - a constant
        return [
            ModelEntry(
                name=row.name,
                allowed=row.allowed,
                refused=row.refused,
                owned_by=row.owned_by,
                max_tokens=row.max_tokens if row.max_tokens is not None else limits.max_tokens_cap,
                max_prompt_chars=row.max_prompt_chars if row.max_prompt_chars is not None else limits.max_prompt_chars,
                max_queue=row.max_queue if row.max_queue is not None else limits.max_queue,
                created=int(row.created_at.timestamp()),
                fallbacks=tuple(row.fallbacks),
                context_tokens=row.context_tokens,
                tokenizer=row.tokenizer,
                tidy=row.tidy,
                resumes=row.resumes,
                canary_question=row.canary_question,
                canary_answer=row.canary_answer,
                version=row.version,
                price=Price(int(row.input_price * MILLION), int(row.cached_price * MILLION), int(row.output_price * MILLION)),
                weights=Weights.make(limits, row.score_weights) if row.score_weights else None,
            )
            for row in (query if names is None else query.filter(name__in=names))
        ]

    def load_aliases(self) -> list[AliasEntry]:
        return [_read_alias(row) for row in ModelAlias.objects.select_related("tenant").filter(is_active=True).order_by("pk")]

    def apply_keys(self, entries: list[tuple[str, KeyEntry]], *, replace: bool) -> None:
        self.version += 1
        named = next((entry for _, entry in entries if entry.is_keyless), None if replace else self.keyless)
        ended = next((entry for _, entry in entries if named is not None and entry.caller.key_id == named.caller.key_id), named)
        self.keyless = ended if ended is not None and ended.is_keyless else None
        if replace:
            self.keys = dict(entries)
            return
        # A key that was rotated has another key id, and its old one is nobody's.
        newest = {entry.caller.key_id: keyid for keyid, entry in entries}
        for keyid in [old for old, entry in self.keys.items() if newest.get(entry.caller.key_id, old) != old]:
            del self.keys[keyid]
        self.keys.update(entries)

    def apply_models(self, entries: list[ModelEntry]) -> None:
        self.version += 1
        self.models = {entry.name: entry for entry in entries}
        self.weights.clear()
        self.weights.update((entry.name, entry.weights) for entry in entries if entry.weights is not None)

    def apply_named_models(self, names: Collection[str], entries: list[ModelEntry]) -> None:
        """Take what ``load_models`` returned for these names; one without a row is gone."""
        kept = [entry for name, entry in self.models.items() if name not in names]
        self.apply_models([*kept, *entries])

    @property
    def models_mark(self) -> int:
        """What ``Marks.models`` is as long as no model but those in memory was written."""
        return sum(entry.version for entry in self.models.values())

    def apply_aliases(self, entries: list[AliasEntry]) -> None:
        self.version += 1
        if entries == self._alias_entries:
            return
        for entry in entries:
            if not entry.alias.targets:
                logger.error("alias.unreadable name=%r tenant=%r; it is left out", entry.alias.name, entry.tenant)
        readable = [entry for entry in entries if entry.alias.targets]
        shared = {entry.alias.name: entry.alias for entry in readable if entry.tenant is None}
        # A table for each tenant that has some, so that a request makes one look-up.
        by_tenant: dict[str, dict[str, Alias]] = {}
        for entry in readable:
            if entry.tenant is not None:
                by_tenant.setdefault(entry.tenant, dict(shared))[entry.alias.name] = entry.alias
        self._alias_entries, self._shared_aliases, self._aliases_by_tenant = entries, shared, by_tenant

    def _key_entry(self, key: ApiKey) -> KeyEntry:
        tenant = key.tenant
        limit = key.requests_per_minute or tenant.requests_per_minute or self._limits.requests_per_minute
        return KeyEntry(
            digest=bytes(key.digest),
            caller=Caller(
                key_id=key.pk,
                key_name=key.name,
                tenant=tenant.name,
                requests_per_minute=limit,
                allowed_models=frozenset(key.allowed_models),
                priority=Priority(key.priority),
                stores_responses=tenant.stores_responses,
                responses_kept_days=tenant.responses_kept_days,
                budgets=(
                    *_own_budgets(f"key:{key.pk}", f"the key {key.name}", key.budgets),
                    *_own_budgets(f"tenant:{tenant.name}", f"the tenant {tenant.name}", tenant.budgets),
                ),
                weight=tenant.weight / 100,
            ),
            revoked=key.revoked_at is not None or not tenant.is_active,
            expires_at=key.expires_at.timestamp() if key.expires_at is not None else None,
            is_keyless=bool(key.variable),
        )


def _own_budgets(owner: str, label: str, stored: object) -> list[OwnedBudget]:
    budgets = msgspec.convert(stored, tuple[Budget, ...])
    return [OwnedBudget(owner, label, budget) for budget in budgets if budget.is_hard]


def _read_alias(row: ModelAlias) -> AliasEntry:
    try:
        targets = msgspec.convert(row.targets, tuple[Target, ...])
    except msgspec.ValidationError:
        targets = ()
    tenant = row.tenant.name if row.tenant is not None else None
    return AliasEntry(tenant, Alias(row.name, targets, int(row.created_at.timestamp())))


def store_key_use(used: dict[uuid.UUID, float]) -> None:
    """Write when keys were last used; ``used`` maps key id to Unix seconds. That is no change of them."""
    for key_id, at in used.items():
        moment = datetime.fromtimestamp(at, tz=timezone.get_current_timezone())
        ApiKey.objects.filter(Q(last_used_at__lt=moment) | Q(last_used_at=None), pk=key_id).update(last_used_at=moment)


def read_marks(*, since: int | None, gateway_id: uuid.UUID, credentials: list[int], dead_s: float) -> Marks:
    """Look what changed for one gateway, in one statement. ``since``: of the look before; None = there was none.

    ``dead_s``: seconds after which a gateway without a heartbeat is no longer alive.
    """
    values: dict[str, str | float | uuid.UUID | list[int]] = {
        "since": str(since or 0),
        "gateway": gateway_id,
        "key": gateway_id.hex,
        "credentials": credentials,
        "dead_s": dead_s,
    }
    with connection.cursor() as cursor:
        cursor.execute(_MARKS, values)
        newest, has_new_keys, models, aliases, nodes, ticket_keys, authorities, revoked, ids, urls = cursor.fetchone()
    others = dict(zip(ids or (), urls or (), strict=True))
    return Marks(
        int(newest), has_new_keys, models or 0, aliases, nodes or 0, ticket_keys, authorities, frozenset(revoked), others
    )


_RANKS = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}


class Admission:
    """Applies the allow-list and the caps. ``rank_models``: which of some models nodes serve on API paths, best first."""

    def __init__(
        self,
        catalogue: Catalogue,
        is_known_model: Callable[[str], bool],
        rank_models: Callable[[Iterable[str], tuple[str, ...]], list[str]],
    ) -> None:
        self._catalogue = catalogue
        self._is_known_model = is_known_model
        self._rank_models = rank_models

    def admit(self, caller: Caller, request: InferenceRequest) -> list[ModelEntry]:
        """Return the rows of the models that may serve a request, best first, at least one.

        Raises the error of the first rule that is broken; a fallback whose caps are too small for it is left out.
        """
        admitted: list[ModelEntry] = []
        refusal: GatewayError | None = None
        for entry in self.route(caller, request.model, request.paths, request.options):
            error = check_caps(entry, request)
            if error is None:
                admitted.append(entry)
            elif refusal is None:
                refusal = error
        if not admitted and refusal is not None:
            raise refusal
        return admitted

    def route(self, caller: Caller, name: str, paths: tuple[str, ...], options: PoolOptions | None = None) -> list[ModelEntry]:
        """Return the rows of the models behind a name, best first, at least one.

        Raises ModelUnknown (404), ModelNotAllowed (400) or NoAvailableNode.
        """
        models, aliases = self._catalogue.models, self._catalogue.aliases_for(caller.tenant)
        if options is None and name not in aliases and name != AUTO:
            entry = self.find_model(caller, name)
            if not entry.fallbacks:
                return [entry]
        found = resolve(
            name,
            aliases=aliases,
            refuse=lambda model, via: self._refuse(caller, model, via),
            fallbacks_of=lambda model: models[model].fallbacks,
            rank_auto=lambda: self._rank_models([row.name for row in models.values() if row.allowed], paths),
            extra=options.fallback_models if options is not None else (),
        )
        return [models[model] for model in found]

    def list_unusable(self, caller: Caller, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of some names by which the caller gets no model: unknown, not allowed, or not for this key."""
        aliases = self._catalogue.aliases_for(caller.tenant)

        def is_usable(name: str) -> bool:
            alias = aliases.get(name)
            models = (name,) if alias is None else [target.model for target in alias.by_weight]
            return name == AUTO or any(self._refuse(caller, model, name) is None for model in models)

        return tuple(name for name in names if not is_usable(name))

    def find_model(self, caller: Caller, name: str) -> ModelEntry:
        """Return an allowed model. Raises ModelUnknown (404) or ModelNotAllowed (400)."""
        refusal = self._refuse(caller, name, name)
        if refusal is not None:
            raise refusal
        return self._catalogue.models[name]

    def _refuse(self, caller: Caller, name: str, via: str) -> GatewayError | None:
        entry = self._catalogue.models.get(name)
        if entry is None or not entry.allowed:
            if entry is None and not self._is_known_model(name):
                return ModelUnknown(f"The model '{via}' does not exist. GET /v1/models lists what can be used.", param="model")
            return ModelNotAllowed(f"The model '{via}' is not allow-listed here; ask an operator to allow it.", param="model")
        if not may_use(caller.allowed_models, name, via=via):
            return ModelNotAllowed(f"This API key may not use the model '{via}'.", param="model")
        return None


def choose_priority(caller: Caller, options: PoolOptions | None) -> str:
    """Return the key's priority, or the client's wish where that is lower; empty = normal."""
    chosen = caller.priority
    if options is not None and options.priority is not None and _RANKS[options.priority] > _RANKS[chosen]:
        chosen = options.priority
    return "" if chosen is Priority.NORMAL else chosen.value


def check_caps(entry: ModelEntry, request: InferenceRequest) -> GatewayError | None:
    if request.prompt_chars > entry.max_prompt_chars:
        return PromptTooLarge(
            f"Prompt exceeds the size limit: {request.prompt_chars} characters > {entry.max_prompt_chars} maximum.",
            param="messages",
        )
    if request.max_tokens is not None and request.max_tokens > entry.max_tokens:
        return MaxTokensTooLarge(
            f"{request.max_tokens_field} exceeds the limit: {request.max_tokens} > {entry.max_tokens} maximum.",
            param=request.max_tokens_field,
        )
    return None
