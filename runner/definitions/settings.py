"""Settings of a node, checked field by field: settings.json with local.json over it (llm-pool specification).

Reading the two files is all the I/O there is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeVar, cast

import msgspec

from runner.definitions.fields import (
    BACKEND_FIELDS,
    BACKENDS,
    COMMON_FIELDS,
    GPU_BACKENDS,
    POSITIVE,
    REQUIRED,
    Backend,
    Decoding,
    Field,
    ModelDefinition,
    count,
    fields_of,
    find_field,
    is_model_id,
    number,
    owners_of,
    show_name,
    text,
    type_name,
)
from runner.errors import InvalidSettings, SettingsConflict
from runner.limits import limits

MODELS = "engine.models"
_EXACT_V_TYPES = frozenset({"f32", "f16", "bf16"})
_NO_TEMPLATE = frozenset({"tgi", "openai_compatible", "whisper", "comfyui"})
"""Backends that are given no variables of a chat template, or have none."""
_SPECULATIVE = (
    "vllm_num_speculative_tokens", "vllm_speculative_moe_backend", "vllm_speculative_attention_backend",
)  # fmt: skip
Problem = tuple[str, str]
"""The field to name, and what is wrong and what would do, to follow the name."""
Section = TypeVar("Section", bound=msgspec.Struct)


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """Where the runner's API listens; None = not said here."""

    host: Annotated[str, text("a host name or address")] | None = None
    port: Annotated[int, count(1, 65535, unit="port")] | None = None
    log_level: Literal["debug", "info", "warning", "error"] | None = None


class Fairness(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of tenants in a model's time, and how many of their requests run (softly) and wait (at most)."""

    weights: dict[str, float] = {}
    soft_inflight_per_key: Annotated[int, count(1, 1024, unit="requests")] = 1
    pending_per_key: Annotated[int, count(1, 65536, unit="requests")] = 32
    pending_per_executor: Annotated[int, count(1, 65536, unit="requests")] = 128


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """What a million tokens of a remote model cost, in the currency of the settings."""

    input_per_million: Annotated[float, REQUIRED, number(0.0)]
    output_per_million: Annotated[float, REQUIRED, number(0.0)]


@dataclass(frozen=True, slots=True)
class Remote:
    """Limits for models that cost money. ``monthly_cap`` holds for a tenant without one of its own in ``caps``.

    None = no cap; 0 = nothing may be spent. Amounts are in ``currency``; ``prices`` by model id.
    """

    currency: str = "USD"
    monthly_cap: float | None = None
    caps: Mapping[str, float] = field(default_factory=dict)
    prices: Mapping[str, Price] = field(default_factory=dict)

    def cap_for(self, tenant: str) -> float | None:
        """Return what a tenant may spend in a month, None for any amount."""
        return self.caps.get(tenant, self.monthly_cap)


_CURRENCY = Field(Annotated[str, text("three letters such as EUR", "[A-Z]{3}")])
_MONEY, _CAP = Field(Annotated[float, number(0.0)]), Field(Annotated[float, number(0.0)] | None)
_WEIGHT = Field(Annotated[float, POSITIVE])


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings with defaults filled in. ``models`` by model id; ``decoding`` holds where a request says nothing."""

    service: Service = field(default_factory=Service)
    decoding: Decoding = field(default_factory=Decoding)
    models: Mapping[str, ModelDefinition] = field(default_factory=dict)
    fairness: Fairness = field(default_factory=Fairness)
    remote: Remote = field(default_factory=Remote)


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """What new settings change: model ids in order. ``service_restart_required``: host, port or log level are others."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    updated: tuple[str, ...]
    unchanged: tuple[str, ...]
    service_restart_required: bool


def read_settings(base: Path | None, local: Path | None) -> Settings:
    """Return the settings of ``base`` with ``local`` merged over it; a ``local`` that does not exist counts as empty.

    Objects are merged key by key, anything else is replaced. Raises InvalidSettings, which names the file and line, or the
    dotted path of the field, what it got and what is allowed; values that could be secret are not repeated.
    """
    merged: dict[str, object] = {} if base is None else _read_file(base)
    if local is not None and local.exists():
        merged = merge_settings(merged, _read_file(local))
    return parse_settings(merged)


def merge_settings(base: Mapping[str, object], local: Mapping[str, object]) -> dict[str, object]:
    """Return ``base`` with ``local`` over it: objects key by key, at any depth, anything else as ``local`` has it."""
    merged = dict(base)
    for name, value in local.items():
        below = merged.get(name)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[name] = merge_settings(below, value)
        else:
            merged[name] = value
    return merged


def parse_settings(merged: Mapping[str, object]) -> Settings:
    """Return the settings of an object as the files have it. Raises InvalidSettings."""
    top = _read_object(merged, "", {"service", "engine"})
    engine = _read_object(top.get("engine", {}), "engine", {"backend", "decoding", "models", "fairness", "remote"})
    backend = engine.get("backend")
    if "backend" in engine:
        _check_value(backend, "engine.backend", COMMON_FIELDS["backend"])
    decoding = _read_section(engine.get("decoding", {}), "engine.decoding", Decoding)
    models = _read_models(engine.get("models", {}), cast("Backend | None", backend))
    service = _read_section(top.get("service", {}), "service", Service)
    fairness = dict(_read_object(engine.get("fairness", {}), "engine.fairness", fields_of(Fairness)))
    weights = _read_tenants(fairness.pop("weights", {}), "engine.fairness.weights", _WEIGHT)
    return Settings(
        service=service,
        decoding=decoding,
        models=models,
        fairness=msgspec.structs.replace(_read_section(fairness, "engine.fairness", Fairness), weights=weights),
        remote=_read_remote(
            engine.get("remote", {}), {name for name, model in models.items() if model.backend == "openai_compatible"}
        ),
    )


def diff_settings(old: Settings, new: Settings, loaded: Collection[str]) -> SettingsChange:
    """Return what ``new`` changes. ``loaded``: ids of models that are loaded, or on the way in or out.

    Raises SettingsConflict when one of those would change or go; ``details`` has ``conflicts``, dotted paths.
    """
    both = old.models.keys() & new.models.keys()
    updated = {name for name in both if old.models[name] != new.models[name]}
    removed = old.models.keys() - new.models.keys()
    conflicts = [f"{MODELS}.{name}" for name in sorted((updated | removed) & set(loaded))]
    if conflicts:
        raise SettingsConflict(
            f"loaded models would change: {', '.join(conflicts)}; unload them first, then reload the settings.",
            details={"conflicts": conflicts},
        )
    return SettingsChange(
        added=tuple(sorted(new.models.keys() - old.models.keys())),
        removed=tuple(sorted(removed)),
        updated=tuple(sorted(updated)),
        unchanged=tuple(sorted(both - updated)),
        service_restart_required=old.service != new.service,
    )


def find_problem(values: Mapping[str, object]) -> Problem | None:
    """Return the first rule that options of a model break together, None when all hold. Absent and null mean the same."""
    k_bits, v_bits = values.get("exllama_cache_k_bits"), values.get("exllama_cache_v_bits")
    if (k_bits is not None or v_bits is not None) and values.get("exllama_cache_quant") is not None:
        return (
            "exllama_cache_quant",
            "cannot go together with exllama_cache_k_bits and exllama_cache_v_bits; set one of the two ways to null",
        )
    if (k_bits is None) is not (v_bits is None):
        missing, given = ("k", "v") if k_bits is None else ("v", "k")
        return f"exllama_cache_{missing}_bits", f"is needed too when exllama_cache_{given}_bits is given; 2 to 8 bits"
    type_v = values.get("gguf_type_v")
    # llama.cpp refuses a quantised V cache without flash attention.
    if values.get("gguf_flash_attn") == "off" and type_v is not None and type_v not in _EXACT_V_TYPES:
        return "gguf_type_v", f"cannot be {type_v} with gguf_flash_attn off; set gguf_flash_attn to on or auto"
    if values.get("vllm_speculative_method") is None and values.get("vllm_speculative_model") is None:
        for name in _SPECULATIVE:
            if values.get(name) is not None:
                return name, "does nothing without vllm_speculative_method or vllm_speculative_model; give one of them"
    return None


def _find_misplaced(backend: str, values: Mapping[str, object]) -> Problem | None:
    # A common field that would do nothing for the backend is refused: its owner would take it for done.
    device, own = values.get("device"), {name for name, value in values.items() if value is not None}
    if "gpu_count" in own and backend not in GPU_BACKENDS:
        return "gpu_count", f"does nothing for {backend}, whose GPUs are not chosen by the node; take it out"
    if "gpu_count" in own and device == "cpu":
        return "gpu_count", "cannot go together with device cpu; leave one of them out"
    if device is not None and backend == "tgi":
        return "device", "is not told to TGI; say with CUDA_VISIBLE_DEVICES what it may use"
    if device is not None and backend in {"llama_server", "tabbyapi", "comfyui", "openai_compatible"}:
        return "device", "is decided by the server that has the model; take it out"
    if device == "cpu" and backend == "exllamav3":
        return "device", "cannot be cpu: ExLlamaV3 runs on GPUs alone"
    if device == "cpu" and backend == "gguf" and values.get("gguf_n_gpu_layers") not in {None, 0}:
        return "gguf_n_gpu_layers", f"cannot be {values['gguf_n_gpu_layers']} with device cpu; leave one of them out"
    for name in ("prompt_format", "enable_thinking"):
        if name in own and backend in _NO_TEMPLATE:
            return name, f"does nothing for {backend}, which is given no variables of a chat template; take it out"
    if "enable_thinking" in own and values.get("prompt_format") == "translategemma_template":
        return "enable_thinking", "does nothing with prompt_format translategemma_template, which has no such switch"
    return None


def _read_models(value: object, default_backend: Backend | None) -> dict[str, ModelDefinition]:
    definitions: dict[str, ModelDefinition] = {}
    for model_id, fields in _read_object(value, MODELS, None).items():
        if not is_model_id(model_id):
            raise InvalidSettings(
                f"{MODELS}: {show_name(model_id)!r} cannot be used, a name must be a model id: at most "
                f"{limits().models.id_chars} letters, digits and . _ : @ + - / that begins with a letter or digit",
                param=MODELS,
            )
        definitions[model_id] = _read_model(model_id, fields, default_backend)
    return definitions


def _read_model(model_id: str, value: object, default_backend: Backend | None) -> ModelDefinition:
    path = f"{MODELS}.{model_id}"
    fields = dict(_read_object(value, path, None))
    backend = _read_backend(fields, path, default_backend)
    for name, given in fields.items():
        known = find_field(backend, name)
        if known is None:
            raise InvalidSettings(_describe_unknown(path, name, backend), param=f"{path}.{name}")
        _check_value(given, f"{path}.{name}", known)
    own = BACKEND_FIELDS[backend]
    for name, known in own.items():
        if known.is_required and fields.get(name) is None:
            raise _missing(f"{path}.{name}", known)
    options = {name: given for name, given in fields.items() if name in own}
    problem = _find_misplaced(backend, fields) or find_problem(options)
    if problem is not None:
        raise InvalidSettings(f"{path}.{problem[0]} {problem[1]}", param=f"{path}.{problem[0]}")
    common = {name: given for name, given in fields.items() if name in COMMON_FIELDS}
    common.setdefault("replica_max", common.get("replicas", 1))
    definition = msgspec.convert({**common, "backend": backend, "model_id": model_id, "options": options}, ModelDefinition)
    if definition.replicas > definition.replica_max:
        raise InvalidSettings(
            f"{path}.replicas is {definition.replicas}, more than replica_max, which is {definition.replica_max}",
            param=f"{path}.replicas",
        )
    return definition


def _read_backend(fields: Mapping[str, object], path: str, default: Backend | None) -> Backend:
    if "backend" in fields:
        _check_value(fields["backend"], f"{path}.backend", COMMON_FIELDS["backend"])
        return cast("Backend", fields["backend"])
    if default is None:
        raise InvalidSettings(
            f"{path}.backend is missing; it must be one of {', '.join(BACKENDS)}, here or as engine.backend for all models",
            param=f"{path}.backend",
        )
    return default


def _describe_unknown(path: str, name: str, backend: str) -> str:
    owners = owners_of(name)
    if owners:
        return f"{path}.{name} is a field of {', '.join(owners)}, but the model's backend is {backend}; take it out"
    known = ", ".join(sorted([*COMMON_FIELDS, *BACKEND_FIELDS[backend]]))
    return f"{path}.{name} is unknown; a {backend} model may have {known}"


def _read_remote(value: object, remote_models: Collection[str]) -> Remote:
    path = "engine.remote"
    fields = _read_object(value, path, {"currency", "monthly_cap", "prices"})
    currency = fields.get("currency", "USD")
    _check_value(currency, f"{path}.currency", _CURRENCY)
    cap_path = f"{path}.monthly_cap"
    caps = _read_object(fields.get("monthly_cap", {}), cap_path, {"default", "tenants"})
    default = caps.get("default")
    _check_value(default, f"{cap_path}.default", _CAP)
    prices: dict[str, Price] = {}
    for model_id, price in _read_object(fields.get("prices", {}), f"{path}.prices", None).items():
        where = f"{path}.prices.{show_name(model_id)}"
        if model_id not in remote_models:
            raise InvalidSettings(f"{where} is not the id of an openai_compatible model of these settings", param=where)
        prices[model_id] = _read_section(price, where, Price)
    return Remote(
        currency=str(currency),
        monthly_cap=None if default is None else msgspec.convert(default, float),
        caps=_read_tenants(caps.get("tenants", {}), f"{cap_path}.tenants", _MONEY),
        prices=prices,
    )


def _read_tenants(value: object, path: str, known: Field) -> dict[str, float]:
    tenants: dict[str, float] = {}
    for tenant, amount in _read_object(value, path, None).items():
        if not tenant or len(tenant) > limits().admission.tenant_chars or tenant != tenant.strip() or not tenant.isprintable():
            raise InvalidSettings(
                f"{path}: a tenant is named by 1 to {limits().admission.tenant_chars} printable characters", param=path
            )
        _check_value(amount, f"{path}.{tenant}", known)
        tenants[tenant] = msgspec.convert(amount, float)
    return tenants


def _read_section(value: object, path: str, section: type[Section]) -> Section:
    known = fields_of(section)
    given = _read_object(value, path, known)
    for name, one in given.items():
        _check_value(one, f"{path}.{name}", known[name])
    for name, declared in known.items():
        if declared.is_required and name not in given:
            raise _missing(f"{path}.{name}", declared)
    return msgspec.convert(given, section)


def _read_object(value: object, path: str, known: Collection[str] | None) -> Mapping[str, object]:
    """Return an object whose names are among ``known`` (None = any). Raises InvalidSettings naming the dotted path."""
    if not isinstance(value, Mapping):
        raise _refuse(value, path or "the settings", "an object")
    for name in value:
        if known is not None and name not in known:
            dotted = f"{path}.{show_name(name)}".lstrip(".")
            raise InvalidSettings(f"{dotted} is unknown; allowed here: {', '.join(sorted(known))}", param=dotted)
    return value


def _check_value(value: object, path: str, known: Field) -> None:
    if not known.accepts(value):
        raise _refuse(value, path, known.allowed())


def _missing(path: str, known: Field) -> InvalidSettings:
    return InvalidSettings(f"{path} is missing; it must be {known.allowed()}", param=path)


def _refuse(value: object, path: str, allowed: str) -> InvalidSettings:
    got = type_name(value)  # numbers are repeated, strings are not, for they may be secret
    if isinstance(value, bool | int | float):
        got += f" ({str(value)[:40]})"
    return InvalidSettings(f"{path} must be {allowed}, not {got}", param=path)


def _read_file(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            data = file.read(limits().models.settings_bytes + 1)
    except OSError as error:
        raise InvalidSettings(f"cannot read the settings file {path}: {error.strerror}") from None
    if len(data) > limits().models.settings_bytes:
        raise InvalidSettings(f"the settings file {path} is larger than {limits().models.settings_bytes // 1024 // 1024} MiB")
    try:
        parsed = json.loads(data, object_pairs_hook=_refuse_repeats, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InvalidSettings(f"{path} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except _Unusable as error:
        raise InvalidSettings(f"{path}: {error}") from None
    except (ValueError, RecursionError):  # not UTF-8, a number of thousands of digits, or nested as deeply
        raise InvalidSettings(f"{path} cannot be read as JSON in UTF-8") from None
    if not isinstance(parsed, dict):
        raise _refuse(parsed, str(path), "an object with service and engine")
    return parsed


class _Unusable(Exception):
    """JSON that every parser reads in its own way."""


def _refuse_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Unusable(f"{next(name for name in names if names.count(name) > 1)[:80]!r} is given twice in one object")
    return found


def _refuse_constant(text: str) -> object:
    raise _Unusable(f"{text} is not a number of JSON")
