"""What the owner of the box writes down: settings.json with local.json over it, checked field by field (llm-pool
specification). Reading the two files is all the I/O there is.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import msgspec

from runner.definitions.combinations import find_misplaced, find_problem
from runner.definitions.decoding import DECODING_FIELDS, Decoding, merge_decoding
from runner.definitions.definition import Backend, ModelDefinition
from runner.definitions.fields import BACKEND_FIELDS, BACKENDS, COMMON_FIELDS, find_field, owners_of
from runner.definitions.kinds import ID, is_model_id
from runner.definitions.sections import (
    Fairness,
    Remote,
    Service,
    check_value,
    read_fairness,
    read_object,
    read_remote,
    read_service,
    refuse,
)
from runner.errors import InvalidSettings, SettingsConflict
from runner.limits import limits

MODELS = "engine.models"


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
    top = read_object(merged, "", {"service", "engine"})
    engine = read_object(top.get("engine", {}), "engine", {"backend", "decoding", "models", "fairness", "remote"})
    backend = engine.get("backend")
    if "backend" in engine:
        check_value(backend, "engine.backend", COMMON_FIELDS["backend"].kind)
    given = read_object(engine.get("decoding", {}), "engine.decoding", set(DECODING_FIELDS))
    for name, value in given.items():
        check_value(value, f"engine.decoding.{name}", DECODING_FIELDS[name])
    models = _read_models(engine.get("models", {}), cast("Backend | None", backend))
    return Settings(
        service=read_service(top.get("service", {})),
        decoding=merge_decoding(Decoding(), given),
        models=models,
        fairness=read_fairness(engine.get("fairness", {})),
        remote=read_remote(
            engine.get("remote", {}),
            remote_models={name for name, model in models.items() if model.backend == "openai_compatible"},
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


def _read_models(value: object, default_backend: Backend | None) -> dict[str, ModelDefinition]:
    models = read_object(value, MODELS, None)
    definitions: dict[str, ModelDefinition] = {}
    for model_id, fields in models.items():
        if not is_model_id(model_id):
            shown = model_id if model_id.isprintable() and len(model_id) <= 80 else "a name"
            raise InvalidSettings(f"{MODELS}: {shown!r} cannot be used, a name must be {ID.allowed()}", param=MODELS)
        definitions[model_id] = _read_model(model_id, fields, default_backend)
    return definitions


def _read_model(model_id: str, value: object, default_backend: Backend | None) -> ModelDefinition:
    path = f"{MODELS}.{model_id}"
    fields = dict(read_object(value, path, None))
    backend = _read_backend(fields, path, default_backend)
    for name, given in fields.items():
        known = find_field(backend, name)
        if known is None:
            raise InvalidSettings(_describe_unknown(path, name, backend), param=f"{path}.{name}")
        check_value(given, f"{path}.{name}", known.kind)
    own = BACKEND_FIELDS[backend]
    for name, known in own.items():
        if known.is_required and fields.get(name) is None:
            raise InvalidSettings(f"{path}.{name} is missing; it must be {known.kind.allowed()}", param=f"{path}.{name}")
    options = {name: given for name, given in fields.items() if name in own}
    problem = find_misplaced(backend, fields) or find_problem(options)
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
        check_value(fields["backend"], f"{path}.backend", COMMON_FIELDS["backend"].kind)
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
        raise refuse(parsed, str(path), "an object with service and engine")
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
