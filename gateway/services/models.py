"""Changes to the model allow-list. A row that is not allowed is a name that some box has declared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from django.db import transaction

from core.hints import publish_hint
from core.limits import limits
from gateway.models import Model, ModelAlias
from gateway.services.errors import InvalidValue, ModelNotFound
from gateway.services.limits import require_approved_caps, require_no_higher_caps
from gateway.services.values import clean_limit, clean_model_name
from governance.audit import record_event
from governance.registry import RunOrder

_FOLDER = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
"""Part by part below one folder: no ``..``, nothing hidden, nothing absolute."""


@transaction.atomic
def allow_model(
    *,
    name: str,
    actor: str,
    max_tokens: int | None = None,
    max_prompt_chars: int | None = None,
    max_queue: int | None = None,
) -> Model:
    """Let clients use a model, whether a box serves it yet or not. A cap left out stays.

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
        model.allowed = True
        for field, value in given.items():
            setattr(model, field, value)
        model.save(update_fields=["allowed", *given, "updated_at"])
        record_event(actor=actor, action="model.allow", target=cleaned, detail=given)
        publish_hint("models", cleaned)
    return model


@transaction.atomic
def disallow_model(*, name: str, actor: str) -> Model:
    """Refuse the model to clients from now on; requests under way end normally. Raises ModelNotFound."""
    model = _get_model(name)
    if model.allowed:
        model.allowed = False
        model.save(update_fields=["allowed", "updated_at"])
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
    actor: str,
) -> Model:
    """Set what stands in for a model, and what clients are told of it. Raises InvalidValue, ModelNotFound.

    ``fallbacks``: models in the order in which they are tried. ``context_tokens`` None = what its boxes say.
    ``tokenizer``: a folder below MUSTER_TOKENIZERS_DIR; empty = none. ``tidy``: put chunks of its chat streams right for strict
    clients, whatever node they come from.
    """
    names = _clean_fallbacks(fallbacks, of=name)
    tokens, folder = clean_limit(context_tokens, param="context_tokens"), _clean_folder(tokenizer)
    after = {"fallbacks": names, "context_tokens": tokens, "tokenizer": folder, "tidy": tidy}
    model = _get_model(name)
    before = {field: getattr(model, field) for field in after}
    if after != before:
        model.fallbacks, model.context_tokens, model.tokenizer, model.tidy = names, tokens, folder, tidy
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
            f"Give a question and what its answer must contain, or neither: the {missing} is empty.", param=missing
        )
    if answer and answer.casefold() in question.casefold():
        raise InvalidValue(
            "The question contains the answer, so a node that repeats what it is asked would pass. Ask otherwise.",
            param="answer",
        )
    model = _get_model(name)
    if (model.canary_question, model.canary_answer) != (question, answer):
        model.canary_question, model.canary_answer = question, answer
        model.save(update_fields=["canary_question", "canary_answer", "updated_at"])
        record_event(actor=actor, action="model.canary", target=name, detail={"is_asked": bool(question)})
        publish_hint("models", name)
    return model


def require_known_models(names: Sequence[str], *, param: str) -> None:
    """Refuse names that no model has, allowed or not. Raises InvalidValue, which names the first of them."""
    known = set(Model.objects.filter(name__in=names).values_list("name", flat=True))
    missing = next((name for name in names if name not in known), None)
    if missing is None:
        return
    if ModelAlias.objects.filter(name=missing).exists():
        raise InvalidValue(f"{missing} is an alias; name the models that it leads to.", param=param)
    raise InvalidValue(f"There is no model {missing}. Allow it first, written exactly as boxes declare it.", param=param)


def remember_models(*, names: Iterable[str]) -> int:
    """Note names that a box declares: they can then be allowed with one click. Returns how many are new."""
    cleaned = {clean_model_name(name) for name in names}
    missing = cleaned - set(Model.objects.filter(name__in=cleaned).values_list("name", flat=True))
    if not missing:
        return 0
    with transaction.atomic():
        Model.objects.bulk_create([Model(name=name) for name in sorted(missing)], ignore_conflicts=True)
        publish_hint("models")
    return len(missing)


def find_model(name: str) -> Model | None:
    """Return the model of that name, allowed or not; None when there is none."""
    return Model.objects.filter(name=name).first()


def list_models() -> list[Model]:
    """Return every model, by name, those that are allowed first; one query."""
    return list(Model.objects.order_by("-allowed", "name"))


def is_model_allowed(name: str) -> bool:
    """Return whether clients may use the model."""
    return Model.objects.filter(name=name, allowed=True).exists()


def _get_model(name: str) -> Model:
    model = Model.objects.select_for_update().filter(name=name).first()
    if model is None:
        raise ModelNotFound(f"There is no model {name}.", param="name")
    return model


def _clean_caps(**caps: int | None) -> dict[str, int | None]:
    return {field: clean_limit(value, param=field) for field, value in caps.items()}


def _clean_fallbacks(names: Iterable[str], *, of: str) -> list[str]:
    cleaned = list(dict.fromkeys(clean_model_name(name, param="fallbacks") for name in names))
    most = limits().gateway.candidates - 1
    if len(cleaned) > most:
        raise InvalidValue(f"A model may have at most {most} fallbacks.", param="fallbacks")
    if of in cleaned:
        raise InvalidValue(f"{of} cannot stand in for itself.", param="fallbacks")
    require_known_models(cleaned, param="fallbacks")
    return cleaned


def _clean_line(text: str, *, param: str, max_chars: int) -> str:
    line = text.strip()
    if len(line) > max_chars or not line.isprintable():
        raise InvalidValue(f"Write the {param} on one line of at most {max_chars} printable characters.", param=param)
    return line


def _clean_folder(text: str) -> str:
    folder = text.strip()
    if folder and (not _FOLDER.fullmatch(folder) or len(folder) > limits().gateway.model_name_chars):
        raise InvalidValue(
            "Name a folder below MUSTER_TOKENIZERS_DIR in letters, digits and ._-/, such as qwen3 or meta/llama-3.",
            param="tokenizer",
        )
    return folder
