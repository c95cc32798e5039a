"""What clients may ask for by name: allow-listed models and the aliases that work. Reads only."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.models import Model, ModelAlias


@dataclass(frozen=True, slots=True)
class AliasOffer:
    """An alias that works. ``tenant`` empty: for everybody. ``models``: what it leads to, in the operator's order."""

    name: str
    tenant: str
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Offers:
    """Names by the alphabet. Whether a box serves a model now is not known here."""

    models: tuple[str, ...]
    aliases: tuple[AliasOffer, ...]


def list_offers() -> Offers:
    """Return every name that may be asked for, in two queries."""
    models = Model.objects.filter(allowed=True).order_by("name").values_list("name", flat=True)
    rows = ModelAlias.objects.filter(is_active=True).select_related("tenant").order_by("name", "pk")
    return Offers(
        models=tuple(models),
        aliases=tuple(
            AliasOffer(
                name=row.name,
                tenant=row.tenant.name if row.tenant is not None else "",
                models=tuple(str(target["model"]) for target in row.targets),
            )
            for row in rows
        ),
    )
