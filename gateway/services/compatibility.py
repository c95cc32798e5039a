"""Compatibility of models and GPUs: what a model needs, and which GPUs of the fleet can run it at what quality.

Source: central-server document, section 1.2. A model has one JSON document; without one, what nodes measured of it counts.
"""

from __future__ import annotations

import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec
from django.db import transaction
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from gateway.models import Model
from gateway.services.errors import InvalidValue, ModelNotFound
from governance.audit import record_event
from nodes.services.gpus import GpuFacts, measure_model, read_gpus, read_places, write_exclusions
from wire.unreadable import UNREADABLE


class Quality(StrEnum):
    """How good the answers of a quantization are."""

    GOOD = "good"
    BETTER = "better"
    BEST = "best"


Mebibytes = Annotated[int, msgspec.Meta(ge=1)]


class Quantization(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What one form of the weights takes. Memory in MiB."""

    vram_mb: Mebibytes
    quality: Quality | None = None


class Requirements(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True, omit_defaults=True):
    """What a GPU must have. ``compute_capability``: by vendor, ``7.0+`` at least and ``7.0`` exactly; a vendor that is not
    named cannot run the model, unless none is.
    """

    min_vram_mb: Mebibytes
    quantizations: dict[str, Quantization] = {}
    compute_capability: dict[str, str] = {}


class _Document(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    requirements: Requirements


class Source(StrEnum):
    """Where it stands what a model needs."""

    DOCUMENT = "document"
    MEASURED = "measured"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class GpuFit:
    """Whether a GPU can run a model. ``quantization``: the best that its memory holds, ``now``: that its free memory does;
    None = there is none, or the document names none. ``reason``: why not, or what is not known; empty = it can.
    """

    gpu: GpuFacts
    can_run: bool
    fits_now: bool
    quantization: str | None
    quality: Quality | None
    now: str | None
    is_loaded: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Compatibility:
    model: str
    source: Source
    requirements: Requirements | None
    fits: tuple[GpuFit, ...]


def read_document(text: str, *, model: str) -> Requirements:
    """Return what a document says that a model needs. Raises InvalidValue, which says the member at fault."""
    if len(text.encode()) > limits().gateway.requirements_bytes:
        raise InvalidValue(
            _("The document has more than %(requirements_bytes)s bytes.")
            % {"requirements_bytes": f"{limits().gateway.requirements_bytes:,}"},
            param="requirements",
        )
    try:
        document = msgspec.json.decode(text.encode(), type=_Document)
    except UNREADABLE as error:
        raise InvalidValue(_("The document cannot be used: %(error)s.") % {"error": error}, param="requirements") from None
    if document.model != model:
        raise InvalidValue(
            _("The document is of %(model)r; this is %(model2)r.") % {"model": document.model[:200], "model2": model},
            param="requirements",
        )
    _check(document.requirements)
    return document.requirements


def print_document(model: str, requirements: Requirements) -> str:
    """Return the document as people edit it."""
    return msgspec.json.format(msgspec.json.encode(_Document(model=model, requirements=requirements)), indent=2).decode()


def _check(said: Requirements) -> None:
    policy = limits().gateway
    if len(said.quantizations) > policy.requirements_quantizations:
        raise InvalidValue(
            _("A model has at most %(requirements_quantizations)s quantizations.")
            % {"requirements_quantizations": policy.requirements_quantizations},
            param="requirements",
        )
    for word in (*said.quantizations, *said.compute_capability, *said.compute_capability.values()):
        if not (0 < len(word) <= policy.requirements_word_chars and word.isprintable()):
            raise InvalidValue(
                _("A name has 1 to %(most)s printable characters, not %(word)r.")
                % {"most": policy.requirements_word_chars, "word": word[:60]},
                param="requirements",
            )
    for name, mb in (("min_vram_mb", said.min_vram_mb), *((name, one.vram_mb) for name, one in said.quantizations.items())):
        if mb > policy.requirements_mb:
            raise InvalidValue(
                _("%(name)s: at most %(requirements_mb)s MiB.")
                % {"name": name, "requirements_mb": f"{policy.requirements_mb:,}"},
                param="requirements",
            )
    for vendor, text in said.compute_capability.items():
        if _read_capability(vendor.lower(), text.removesuffix("+")) is None:
            example = _EXAMPLES.get(vendor.lower())
            advice = f"write it like {example}" if example else f"the vendors are {', '.join(_EXAMPLES)}"
            raise InvalidValue(
                _("compute_capability.%(vendor)s cannot be %(text)r; %(advice)s.")
                % {"vendor": vendor, "text": text, "advice": advice},
                param="requirements",
            )


@transaction.atomic
def change_model_requirements(*, name: str, document: str, actor: str) -> Model:
    """Set what a model needs, as in ``read_document``; empty = what is measured. Raises InvalidValue, ModelNotFound."""
    after = msgspec.to_builtins(read_document(document, model=name)) if document.strip() else None
    model = Model.objects.select_for_update().filter(name=name).first()
    if model is None:
        raise ModelNotFound(_("There is no model %(name)s.") % {"name": name}, param="name")
    if model.requirements != after:
        before, model.requirements = model.requirements, after
        model.save(update_fields=["requirements", "updated_at"])
        record_event(actor=actor, action="model.requirements", target=name, detail={"from": before, "to": after})
        publish_hint("models", name)
        transaction.on_commit(update_exclusions)
    return model


def read_requirements(model: Model) -> tuple[Source, Requirements | None]:
    """Return what a model needs and how that is known; one query where no document says it."""
    if model.requirements is not None:
        try:
            return Source.DOCUMENT, msgspec.convert(model.requirements, Requirements)
        except msgspec.ValidationError:  # of a release that knew more
            return Source.UNKNOWN, None
    measured = measure_model(model.name)
    return (Source.MEASURED, Requirements(min_vram_mb=measured)) if measured else (Source.UNKNOWN, None)


def find_fits(name: str) -> Compatibility:
    """Return which GPUs of the fleet can run a model, at what quality; those that can come first, the most memory first.

    Two queries, and one more where no document says what the model needs. Raises ModelNotFound.
    """
    model = Model.objects.filter(name=name).first()
    if model is None:
        raise ModelNotFound(_("There is no model %(name)s.") % {"name": name}, param="model")
    source, needed = read_requirements(model)
    fits = [judge_gpu(gpu, name, needed) for gpu in read_gpus(name)]
    fits.sort(key=lambda fit: (not fit.can_run, -(fit.gpu.vram_mb or 0)))
    return Compatibility(name, source, needed, tuple(fits))


def explain_misfit(
    model: str, *, node_id: uuid.UUID, quantization: str = "", gpus: Collection[int] = (), parts: int = 1
) -> str:  # fmt: skip
    """Return why no GPU of a node can run a model by its document, of the one that comes nearest; empty = one can, or nobody
    knows. ``gpus``: all of these are needed; ``parts``: how many GPUs share it evenly. ``settings.NODE_MODEL_FIT`` names this
    function, for proposals to load it.
    """
    row = Model.objects.filter(name=model, requirements__isnull=False).first()
    needed = read_requirements(row)[1] if row is not None else None
    if needed is None:
        return ""
    if (wanted := needed.quantizations.get(quantization)) is not None:
        needed = msgspec.structs.replace(needed, min_vram_mb=max(needed.min_vram_mb, wanted.vram_mb), quantizations={})
    if parts > 1:
        needed = _share_out(needed, parts)
    candidates = [gpu for gpu in read_gpus(model, node_id=node_id) if not gpus or gpu.index in gpus]
    fits = sorted((judge_gpu(gpu, model, needed) for gpu in candidates), key=lambda fit: -(fit.gpu.vram_mb or 0))
    if gpus:
        return next((fit.reason for fit in reversed(fits) if not fit.can_run), "")
    return "" if not fits or any(fit.can_run for fit in fits) else fits[0].reason


def update_exclusions() -> int:
    """Have routing send no node requests for a model that none of its GPUs can run by the model's document.

    Return how many nodes changed; idempotent. What is not known of a GPU is not held against it, and a node that runs the model
    on its CPU is not judged by its GPUs. Two queries for each document.
    """
    found: dict[uuid.UUID, list[str]] = defaultdict(list)
    for row in Model.objects.filter(requirements__isnull=False).order_by("name"):
        needed = read_requirements(row)[1]
        if needed is None:
            continue
        gpus: dict[uuid.UUID, list[GpuFacts]] = defaultdict(list)
        for gpu in read_gpus(row.name, is_loaded=True):
            gpus[gpu.node_id].append(gpu)
        places = read_places(row.name)
        for node_id, of_node in gpus.items():
            if not _is_there_room(of_node, places.get(node_id) or [()], needed):
                found[node_id].append(row.name)
    return write_exclusions(found)


def _is_there_room(gpus: Sequence[GpuFacts], places: Sequence[tuple[int, ...]], needed: Requirements) -> bool:
    """Whether the GPUs of one of a node's replicas can run it; those of which the node says no numbers may be on all GPUs."""
    for named in places:
        on = [gpu for gpu in gpus if gpu.index in named]
        if len(on) < len(named) or any(gpu.is_on_cpu for gpu in gpus):
            return True
        share = _share_out(needed, len(on or gpus))
        excluded = [_find_exclusion(gpu, share) for gpu in on or gpus]
        if not (any(excluded) if on else all(excluded)):
            return True
    return False


def _share_out(needed: Requirements, parts: int) -> Requirements:
    quantizations = {
        name: msgspec.structs.replace(one, vram_mb=-(-one.vram_mb // parts)) for name, one in needed.quantizations.items()
    }
    return msgspec.structs.replace(needed, min_vram_mb=-(-needed.min_vram_mb // parts), quantizations=quantizations)


def judge_gpu(gpu: GpuFacts, model: str, needed: Requirements | None) -> GpuFit:
    """Return whether a GPU can run a model that needs this; None = nobody knows what it needs."""
    is_loaded = model in gpu.models
    if gpu.is_on_cpu:
        return GpuFit(
            gpu=gpu, can_run=True, fits_now=is_loaded, quantization=None, quality=None, now=None, is_loaded=is_loaded,
            reason="its node runs it on the CPU",
        )  # fmt: skip
    can_run, reason = (True, "") if needed is None and is_loaded else _judge(gpu, needed)
    best = _find_best(needed, gpu.vram_mb) if can_run else None
    is_free = can_run and needed is not None and gpu.vram_free_mb is not None and gpu.vram_free_mb >= needed.min_vram_mb
    now = _find_best(needed, gpu.vram_free_mb) if is_free else None
    return GpuFit(
        gpu=gpu,
        can_run=can_run,
        fits_now=is_free and (now is not None or not (needed and needed.quantizations)),
        quantization=best[0] if best else None,
        quality=best[1].quality if best else None,
        now=now[0] if now else None,
        is_loaded=is_loaded,
        reason=reason,
    )


def _judge(gpu: GpuFacts, needed: Requirements | None) -> tuple[bool, str]:
    if needed is None:
        return False, "nobody knows what the model needs"
    if excluded := _find_exclusion(gpu, needed):
        return False, excluded
    if gpu.vram_mb is None:
        return False, "the node does not say how much memory it has"
    vendor, wanted = _find_wanted(gpu, needed)
    is_told = _read_capability(vendor, gpu.compute_capability) is not None
    return True, f"its node does not say that it is {wanted}" if wanted and not is_told else ""


def _find_wanted(gpu: GpuFacts, needed: Requirements) -> tuple[str, str]:
    """Return the vendor of a GPU, and the capability that one of it needs; empty = none."""
    vendor = gpu.vendor.lower()
    return vendor, next((text for name, text in needed.compute_capability.items() if name.lower() == vendor), "")


def _find_exclusion(gpu: GpuFacts, needed: Requirements) -> str:
    """Return why a GPU cannot run what needs this, as far as is known of it; empty = nothing known speaks against it."""
    vendors = [name.lower() for name in needed.compute_capability]
    vendor, wanted = _find_wanted(gpu, needed)
    if vendors and vendor and vendor not in vendors:
        return f"it needs a GPU of {' or '.join(vendors)}"
    has = _read_capability(vendor, gpu.compute_capability)
    least = _read_capability(vendor, wanted.removesuffix("+"))
    if has is not None and least is not None and not (has >= least if wanted.endswith("+") else has == least):
        return f"it needs {vendor} {wanted}, and this is {gpu.compute_capability}"
    if gpu.vram_mb is not None and gpu.vram_mb < (least_mb := _find_least(needed)):
        return f"it needs {least_mb:,} MiB, and this has {gpu.vram_mb:,}"
    return ""


def _find_least(needed: Requirements) -> int:
    return max(needed.min_vram_mb, min((one.vram_mb for one in needed.quantizations.values()), default=0))


def _find_best(needed: Requirements | None, vram_mb: int | None) -> tuple[str, Quantization] | None:
    if needed is None or vram_mb is None or vram_mb < needed.min_vram_mb:
        return None
    fitting = [(name, one) for name, one in needed.quantizations.items() if one.vram_mb <= vram_mb]
    order = list(Quality)
    return max(
        fitting, key=lambda pair: (order.index(pair[1].quality) if pair[1].quality else -1, pair[1].vram_mb), default=None
    )


_EXAMPLES = {"nvidia": "7.0+", "amd": "gfx1030+", "apple": "m1+"}
_FORMS: Mapping[str, tuple[re.Pattern[str], Callable[[re.Match[str]], tuple[int, ...]]]] = {
    "nvidia": (re.compile(r"(\d{1,3})(?:\.(\d{1,3}))?"), lambda found: (int(found[1]), int(found[2] or 0))),
    # LLVM, "User Guide for AMDGPU Backend": major in decimal, minor and stepping one hexadecimal digit each.
    "amd": (
        re.compile(r"gfx(\d{1,2})([0-9a-f])([0-9a-f])"),
        lambda found: (int(found[1]), int(found[2], 16), int(found[3], 16)),
    ),
    "apple": (re.compile(r"m(\d{1,2})"), lambda found: (int(found[1]),)),
}


def _read_capability(vendor: str, text: str) -> tuple[int, ...] | None:
    """Return a compute capability as numbers that can be compared with those of the same vendor; None = it is none."""
    if vendor not in _FORMS:
        return None
    pattern, read = _FORMS[vendor]
    found = pattern.fullmatch(text.strip().lower())
    return read(found) if found is not None else None
