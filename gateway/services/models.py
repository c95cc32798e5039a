"""Changes to the model allow-list. A row that is not allowed is a name that some node has declared."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum

from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from gateway.models import Model, ModelAlias
from gateway.routing import Target
from gateway.services.errors import AliasNotFound, InvalidValue, ModelNotFound, NameTaken
from gateway.services.limits import clean_limit, clean_model_name, require_approved_caps, require_no_higher_caps
from gateway.services.tenants import get_tenant
from gateway.values import Weights
from governance.audit import record_event
from governance.registry import RunOrder
from nodes.services.availability import read_served_models
from wire import clock

logger = logging.getLogger("muster.gateway")

# Part by part below one folder: no ``..``, nothing hidden, nothing absolute.
_FOLDER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")


@transaction.atomic
def allow_model(
    *,
    name: str,
    actor: str,
    max_tokens: int | None = None,
    max_prompt_chars: int | None = None,
    max_queue: int | None = None,
) -> Model:
    """Let clients use a model, whether a node serves it yet or not. A cap left out stays.

    Raises InvalidValue, and ApprovalNeeded for a cap above the one of today, which for a new name is the default: allow it
    without, then propose to raise it.
    """
    cleaned = clean_model_name(name)
    caps = _clean_caps(max_tokens=max_tokens, max_prompt_chars=max_prompt_chars, max_queue=max_queue)
    given = {field: value for field, value in caps.items() if value is not None}
    model, created = Model.objects.select_for_update().get_or_create(name=cleaned)
    advice = "" if model.allowed else "Allow it without, then have it raised."
    require_no_higher_caps(model, given, what="a new model" if created else f"the model {cleaned}", advice=advice)
    if not model.allowed or any(getattr(model, field) != value for field, value in given.items()):
        model.allowed, model.refused = True, False
        for field, value in given.items():
            setattr(model, field, value)
        model.save(update_fields=["allowed", "refused", *given, "updated_at"])
        record_event(actor=actor, action="model.allow", target=cleaned, detail=given)
        publish_hint("models", cleaned)
    return model


@transaction.atomic
def disallow_model(*, name: str, actor: str) -> Model:
    """Refuse the model to clients from now on, also where a credential would allow it; requests under way end normally.

    Raises ModelNotFound.
    """
    model = _get_model(name)
    if model.allowed:
        model.allowed, model.refused = False, True
        model.save(update_fields=["allowed", "refused", "updated_at"])
        record_event(actor=actor, action="model.disallow", target=name)
        publish_hint("models", name)
    return model


@transaction.atomic
def change_model_caps(
    *, name: str, max_tokens: int | None, max_prompt_chars: int | None, max_queue: int | None, actor: str
) -> Model:
    """Set all caps of a model; None = the setting.

    Raises InvalidValue, ModelNotFound, and ApprovalNeeded when one is above the one of today.
    """
    caps = _clean_caps(max_tokens=max_tokens, max_prompt_chars=max_prompt_chars, max_queue=max_queue)
    model = _get_model(name)
    require_no_higher_caps(model, caps, what=f"the model {name}")
    before = {field: getattr(model, field) for field in caps}
    for field, value in caps.items():
        setattr(model, field, value)
    model.save(update_fields=[*caps, "updated_at"])
    record_event(actor=actor, action="model.caps", target=name, detail={"from": before, "to": caps})
    publish_hint("models", name)
    return model


@transaction.atomic
def raise_model_caps(
    *,
    name: str,
    actor: str,
    order: RunOrder,
    max_tokens: int | None = None,
    max_prompt_chars: int | None = None,
    max_queue: int | None = None,
) -> Model:
    """Carry out an approved raise of a model's caps (None = as it is): all of it or nothing.

    Raises ModelNotFound; ApprovalNeeded when ``order`` is no approved run for this model and these very caps; InvalidValue for
    a number that cannot be used, and when the model has as much by now.
    """
    caps = _clean_caps(max_tokens=max_tokens, max_prompt_chars=max_prompt_chars, max_queue=max_queue)
    given = {field: value for field, value in caps.items() if value is not None}
    model = _get_model(name)
    require_approved_caps(model, given, order=order)
    before = {field: getattr(model, field) for field in given}
    for field, value in given.items():
        setattr(model, field, value)
    model.save(update_fields=[*given, "updated_at"])
    detail = {"from": before, "to": given}
    record_event(actor=actor, action="model.raise", target=name, detail=detail, op_id=order.op_id)
    publish_hint("models", name)
    return model


@transaction.atomic
def change_model_details(
    *,
    name: str,
    fallbacks: Iterable[str],
    context_tokens: int | None,
    tokenizer: str,
    tidy: bool,
    resumes: bool,
    actor: str,
) -> Model:
    """Set what stands in for a model, and what clients are told of it. Raises InvalidValue, ModelNotFound.

    ``fallbacks``: models in the order in which they are tried. ``context_tokens`` None = what its nodes say.
    ``tokenizer``: a folder below MUSTER_TOKENIZERS_DIR; empty = none. ``tidy``: put chunks of its chat streams right for strict
    clients, whatever node they come from. ``resumes``: have another node go on with a stream whose node dies.
    """
    names = _clean_fallbacks(fallbacks, of=name)
    tokens, folder = clean_limit(context_tokens, param="context_tokens"), _clean_folder(tokenizer)
    after = {"fallbacks": names, "context_tokens": tokens, "tokenizer": folder, "tidy": tidy, "resumes": resumes}
    model = _get_model(name)
    before = {field: getattr(model, field) for field in after}
    if after != before:
        model.fallbacks, model.context_tokens, model.tokenizer = names, tokens, folder
        model.tidy, model.resumes = tidy, resumes
        model.save(update_fields=[*after, "updated_at"])
        record_event(actor=actor, action="model.details", target=name, detail={"from": before, "to": after})
        publish_hint("models", name)
    return model


@transaction.atomic
def change_model_canary(*, name: str, question: str, answer: str, actor: str) -> Model:
    """Set what the nodes of a model are asked now and then, and what their answer must contain; both empty = nothing.

    Raises InvalidValue, ModelNotFound.
    """
    question = _clean_line(question, param="question", max_chars=limits().gateway.canary_question_chars)
    answer = _clean_line(answer, param="answer", max_chars=limits().gateway.canary_answer_chars)
    if bool(question) != bool(answer):
        missing = "answer" if question else "question"
        raise InvalidValue(
            _("Give a question and what its answer must contain, or neither: the %(missing)s is empty.") % {"missing": missing},
            param=missing,
        )
    if answer and answer.casefold() in question.casefold():
        raise InvalidValue(
            _("The question contains the answer, so a node that repeats what it is asked would pass. Ask otherwise."),
            param="answer",
        )
    model = _get_model(name)
    if (model.canary_question, model.canary_answer) != (question, answer):
        model.canary_question, model.canary_answer = question, answer
        model.save(update_fields=["canary_question", "canary_answer", "updated_at"])
        record_event(actor=actor, action="model.canary", target=name, detail={"is_asked": bool(question)})
        publish_hint("models", name)
    return model


@transaction.atomic
def change_model_prices(*, name: str, input_price: Decimal, cached_price: Decimal, output_price: Decimal, actor: str) -> Model:
    """Set what a million tokens of a model cost, in MUSTER_CURRENCY. Raises InvalidValue, ModelNotFound."""
    after = {"input_price": input_price, "cached_price": cached_price, "output_price": output_price}
    most = limits().gateway.price
    for param, price in after.items():
        if not 0 <= price <= most:
            raise InvalidValue(
                _("%(param)s must be between 0 and %(most)s for a million tokens.") % {"param": param, "most": f"{most:,}"},
                param=param,
            )
    if cached_price > input_price:  # so that nothing costs more than was reserved
        raise InvalidValue(_("cached_price must not be above input_price."), param="cached_price")
    model = _get_model(name)
    before = {param: str(getattr(model, param)) for param in after}
    model.input_price, model.cached_price, model.output_price = input_price, cached_price, output_price
    model.save(update_fields=[*after, "updated_at"])
    detail = {"from": before, "to": {param: str(price) for param, price in after.items()}}
    record_event(actor=actor, action="model.prices", target=name, detail=detail)
    publish_hint("models", name)
    return model


@transaction.atomic
def change_model_weights(*, name: str, weights: Mapping[str, float], actor: str) -> Model:
    """Set by what the nodes of a model are scored, where that differs from the settings. Raises InvalidValue, ModelNotFound."""
    require_weights(weights, param="weights")
    after = {part: float(weights[part]) for part in Weights.__struct_fields__ if part in weights}
    model = _get_model(name)
    if after != model.score_weights:
        before, model.score_weights = model.score_weights, after
        model.save(update_fields=["score_weights", "updated_at"])
        detail = {key: {part: str(one) for part, one in said.items()} for key, said in (("from", before), ("to", after))}
        record_event(actor=actor, action="model.weights", target=name, detail=detail)
        publish_hint("models", name)
    return model


def require_weights(weights: Mapping[str, float], *, param: str) -> None:
    """Refuse what are no weights of parts of a score. Raises InvalidValue."""
    names = Weights.__struct_fields__
    wrong = next((name for name, weight in weights.items() if name not in names or not 0 <= weight <= 1), None)
    if wrong is not None:
        raise InvalidValue(
            _("Weights look like load=0.3,latency=0.4, of %(names)s, from 0 to 1; not %(wrong)r.")
            % {"names": ", ".join(names), "wrong": wrong},
            param=param,
        )


def require_known_models(names: Sequence[str], *, param: str) -> None:
    """Refuse names that no model has, allowed or not. Raises InvalidValue, which names the first of them."""
    known = set(Model.objects.filter(name__in=names).values_list("name", flat=True))
    missing = next((name for name in names if name not in known), None)
    if missing is None:
        return
    if ModelAlias.objects.filter(name=missing).exists():
        raise InvalidValue(_("%(missing)s is an alias; name the models that it leads to.") % {"missing": missing}, param=param)
    raise InvalidValue(
        _("There is no model %(missing)s. Allow it first, written exactly as nodes declare it.") % {"missing": missing},
        param=param,
    )


def remember_models(*, names: Iterable[str]) -> int:
    """Note names that a node declares: they can then be allowed with one click. Returns how many are new.

    A node may declare other names every minute, so beyond ``known_models`` none is noted any more.
    """
    cleaned = {clean_model_name(name) for name in names}
    missing = cleaned - set(Model.objects.filter(name__in=cleaned).values_list("name", flat=True))
    room = max(0, limits().gateway.known_models - Model.objects.count()) if missing else 0
    if len(missing) > room:
        logger.warning("models.too_many_names noted=%d left_out=%d", room, len(missing) - room)
        missing = set(sorted(missing)[:room])
    if not missing:
        return 0
    with transaction.atomic():
        Model.objects.bulk_create([Model(name=name) for name in sorted(missing)], ignore_conflicts=True)
        publish_hint("models")
    return len(missing)


@transaction.atomic
def allow_declared(names: Mapping[str, str]) -> list[str]:
    """Allow models that nodes declare whose credential is trusted to bring them, unless an operator refused them.

    ``names``: by model, the name of the credential. Returns what is new; idempotent, and gateways may do it at once.
    """
    remember_models(names=names)
    wanted = Model.objects.select_for_update().filter(name__in=names, allowed=False, refused=False).order_by("name")
    changed = list(wanted.values_list("name", flat=True))
    Model.objects.filter(name__in=changed).update(allowed=True, updated_at=clock.now())
    for name in changed:
        record_event(actor=f"credential:{names[name]}", action="model.allow", target=name, detail={"declared": True})
        publish_hint("models", name)
    return changed


def find_model(name: str) -> Model | None:
    return Model.objects.filter(name=name).first()


def list_models() -> list[Model]:
    """Return every model, by name, those that are allowed first; one query."""
    return list(Model.objects.order_by("-allowed", "name"))


def is_model_allowed(name: str) -> bool:
    return Model.objects.filter(name=name, allowed=True).exists()


def _get_model(name: str) -> Model:
    model = Model.objects.select_for_update().filter(name=name).first()
    if model is None:
        raise ModelNotFound(_("There is no model %(name)s.") % {"name": name}, param="name")
    return model


def _clean_caps(**caps: int | None) -> dict[str, int | None]:
    return {field: clean_limit(value, param=field) for field, value in caps.items()}


def _clean_fallbacks(names: Iterable[str], *, of: str) -> list[str]:
    cleaned = list(dict.fromkeys(clean_model_name(name, param="fallbacks") for name in names))
    most = limits().gateway.candidates - 1
    if len(cleaned) > most:
        raise InvalidValue(_("A model may have at most %(most)s fallbacks.") % {"most": most}, param="fallbacks")
    if of in cleaned:
        raise InvalidValue(_("%(of)s cannot stand in for itself.") % {"of": of}, param="fallbacks")
    require_known_models(cleaned, param="fallbacks")
    return cleaned


def _clean_line(text: str, *, param: str, max_chars: int) -> str:
    line = text.strip()
    if len(line) > max_chars or not line.isprintable():
        raise InvalidValue(
            _("Write the %(param)s on one line of at most %(most)s printable characters.")
            % {"param": param, "most": max_chars},
            param=param,
        )
    return line


def _clean_folder(text: str) -> str:
    folder = text.strip()
    if folder and (not _FOLDER.fullmatch(folder) or len(folder) > limits().gateway.model_name_chars):
        raise InvalidValue(
            _("Name a folder below MUSTER_TOKENIZERS_DIR in letters, digits and ._-/, such as qwen3 or meta/llama-3."),
            param="tokenizer",
        )
    return folder


class TargetState(StrEnum):
    """Whether a model behind an alias can answer now. ``not allowed`` and ``no node`` are passed over."""

    SERVED = "served"
    NO_NODE = "no node"
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
        raise NameTaken(
            _("There is an alias %(cleaned)s %(whom)s already; change that one.") % {"cleaned": cleaned, "whom": whom},
            param="name",
        ) from error
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
    return [Target(str(target["model"]), int(target["weight"])) for target in alias.targets]


def read_target_states() -> dict[str, TargetState]:
    """Return for every model that some alias leads to whether it can answer at this moment; three queries."""
    names = {str(target["model"]) for targets in ModelAlias.objects.values_list("targets", flat=True) for target in targets}
    allowed = set(Model.objects.filter(name__in=names, allowed=True).values_list("name", flat=True))
    served = read_served_models()
    states = {name: TargetState.SERVED if name in served else TargetState.NO_NODE for name in allowed}
    return {name: states.get(name, TargetState.NOT_ALLOWED) for name in names}


def _lock_alias(alias_id: int) -> ModelAlias:
    alias = ModelAlias.objects.select_for_update(of=("self",)).select_related("tenant").filter(pk=alias_id).first()
    if alias is None:
        raise AliasNotFound(_("There is no alias %(alias_id)s.") % {"alias_id": alias_id}, param="alias_id")
    return alias


def _clean_targets(targets: Iterable[Target]) -> list[Target]:
    chosen = [Target(clean_model_name(target.model, param="targets"), target.weight) for target in targets]
    if not 1 <= len(chosen) <= limits().gateway.candidates:
        raise InvalidValue(
            _("Name 1 to %(candidates)s models that the alias leads to.") % {"candidates": limits().gateway.candidates},
            param="targets",
        )
    names = [target.model for target in chosen]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidValue(_("%(twice)s is named twice; give it one weight.") % {"twice": twice}, param="targets")
    most = limits().gateway.alias_weight
    wrong = next((target.model for target in chosen if not 0 <= target.weight <= most), None)
    if wrong is not None:
        raise InvalidValue(
            _("The weight of %(wrong)s must be a whole number from 0 to %(most)s.") % {"wrong": wrong, "most": most},
            param="targets",
        )
    if not any(target.weight for target in chosen):
        raise InvalidValue(
            _("Give one of the models a weight above 0: those of weight 0 only stand in for it."), param="targets"
        )
    require_known_models(names, param="targets")
    return chosen


def _store(targets: Iterable[Target]) -> list[dict[str, object]]:
    return [{"model": target.model, "weight": target.weight} for target in targets]


def _describe(alias: ModelAlias) -> dict[str, object]:
    tenant = alias.tenant.name if alias.tenant is not None else None
    return {"tenant": tenant, "targets": alias.targets, "is_active": alias.is_active}


def _announce(alias: ModelAlias, *, actor: str, action: str, detail: dict[str, object]) -> None:
    record_event(actor=actor, action=action, target=alias.name, detail=detail)
    publish_hint("aliases", alias.name)


@dataclass(frozen=True, slots=True)
class AliasOffer:
    """An alias that works. ``tenant`` empty: for everybody. ``models``: what it leads to, in the operator's order."""

    name: str
    tenant: str
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Offers:
    """Names by the alphabet. Whether a node serves a model now is not known here."""

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
