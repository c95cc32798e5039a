"""Changes to model aliases: names that operators make for models, for everybody or for one tenant.

An alias is configuration and may be deleted: records keep the name that was asked for and the model that answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from django.db import IntegrityError, transaction

from core.hints import publish_hint
from core.limits import limits
from gateway.models import Model, ModelAlias
from gateway.routing import Target
from gateway.services.errors import AliasNotFound, InvalidValue, NameTaken
from gateway.services.models import require_known_models
from gateway.services.tenants import get_tenant
from gateway.services.values import clean_model_name
from governance.audit import record_event
from nodes.services.availability import read_served_models


class TargetState(StrEnum):
    """Whether a model behind an alias can answer now. ``not allowed`` and ``no box`` are passed over."""

    SERVED = "served"
    NO_BOX = "no box"
    NOT_ALLOWED = "not allowed"


@transaction.atomic
def create_alias(
    *, name: str, targets: Iterable[Target], actor: str, tenant_name: str | None = None, is_active: bool = True
) -> ModelAlias:
    """Let clients ask for models by another name; ``tenant_name`` None = clients of every tenant.

    It may be the name of a model, which it then hides, or "auto". A tenant's own alias wins over one for everybody.
    Raises InvalidValue, NameTaken, TenantNotFound.
    """
    cleaned = clean_model_name(name)
    chosen = _clean_targets(targets)
    tenant = get_tenant(tenant_name) if tenant_name is not None else None
    try:
        with transaction.atomic():
            alias = ModelAlias.objects.create(name=cleaned, tenant=tenant, targets=_store(chosen), is_active=is_active)
    except IntegrityError as error:
        whom = f"of {tenant_name}" if tenant_name is not None else "for everybody"
        raise NameTaken(f"There is an alias {cleaned} {whom} already; change that one.", param="name") from error
    _announce(alias, actor=actor, action="alias.create", detail=_describe(alias))
    return alias


@transaction.atomic
def change_alias(
    *, alias_id: int, actor: str, targets: Iterable[Target] | None = None, is_active: bool | None = None
) -> ModelAlias:
    """Set where an alias leads and whether it works; None = as it is. Raises AliasNotFound, InvalidValue."""
    chosen = _clean_targets(targets) if targets is not None else None
    alias = _lock_alias(alias_id)
    before = _describe(alias)
    alias.targets = _store(chosen) if chosen is not None else alias.targets
    alias.is_active = is_active if is_active is not None else alias.is_active
    after = _describe(alias)
    if after != before:
        alias.save(update_fields=["targets", "is_active", "updated_at"])
        _announce(alias, actor=actor, action="alias.change", detail={"from": before, "to": after})
    return alias


@transaction.atomic
def delete_alias(*, alias_id: int, actor: str) -> None:
    """Delete an alias; requests under way end normally. Raises AliasNotFound."""
    alias = _lock_alias(alias_id)
    _announce(alias, actor=actor, action="alias.delete", detail=_describe(alias))
    alias.delete()


def find_alias(alias_id: int) -> ModelAlias | None:
    """Return an alias with its tenant; None when there is none of that id."""
    return ModelAlias.objects.select_related("tenant").filter(pk=alias_id).first()


def list_aliases() -> list[ModelAlias]:
    """Return every alias with its tenant, by name, the one for everybody first; one query."""
    rows = ModelAlias.objects.select_related("tenant").order_by("name", "tenant__name", "pk")
    return sorted(rows, key=lambda alias: (alias.name, alias.tenant is not None))


def read_targets(alias: ModelAlias) -> list[Target]:
    """Return where an alias leads, in the order in which its targets were given."""
    return [Target(str(target["model"]), int(target["weight"])) for target in alias.targets]


def read_target_states() -> dict[str, TargetState]:
    """Return for every model that some alias leads to whether it can answer at this moment; three queries."""
    names = {str(target["model"]) for targets in ModelAlias.objects.values_list("targets", flat=True) for target in targets}
    allowed = set(Model.objects.filter(name__in=names, allowed=True).values_list("name", flat=True))
    served = read_served_models()
    states = {name: TargetState.SERVED if name in served else TargetState.NO_BOX for name in allowed}
    return {name: states.get(name, TargetState.NOT_ALLOWED) for name in names}


def _lock_alias(alias_id: int) -> ModelAlias:
    alias = ModelAlias.objects.select_for_update(of=("self",)).select_related("tenant").filter(pk=alias_id).first()
    if alias is None:
        raise AliasNotFound(f"There is no alias {alias_id}.", param="alias_id")
    return alias


def _clean_targets(targets: Iterable[Target]) -> list[Target]:
    chosen = [Target(clean_model_name(target.model, param="targets"), target.weight) for target in targets]
    if not 1 <= len(chosen) <= limits().gateway.candidates:
        raise InvalidValue(f"Name 1 to {limits().gateway.candidates} models that the alias leads to.", param="targets")
    names = [target.model for target in chosen]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidValue(f"{twice} is named twice; give it one weight.", param="targets")
    most = limits().gateway.alias_weight
    wrong = next((target.model for target in chosen if not 0 <= target.weight <= most), None)
    if wrong is not None:
        raise InvalidValue(f"The weight of {wrong} must be a whole number from 0 to {most}.", param="targets")
    if not any(target.weight for target in chosen):
        raise InvalidValue("Give one of the models a weight above 0: those of weight 0 only stand in for it.", param="targets")
    require_known_models(names, param="targets")
    return chosen


def _store(targets: Iterable[Target]) -> list[dict[str, object]]:
    return [{"model": target.model, "weight": target.weight} for target in targets]


def _describe(alias: ModelAlias) -> dict[str, object]:
    tenant = alias.tenant.name if alias.tenant is not None else None
    return {"tenant": tenant, "targets": alias.targets, "is_active": alias.is_active}


def _announce(alias: ModelAlias, *, actor: str, action: str, detail: dict[str, object]) -> None:
    record_event(actor=actor, action=action, target=alias.name, detail=detail)
    publish_hint("models", alias.name)
