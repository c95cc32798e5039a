"""What is to be loaded: overrides checked against the definition, the plan that comes of it, how it goes on, what it took.

Pure: environment variables come as a mapping.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Annotated

import msgspec

from runner.definitions.fields import (
    BACKEND_FIELDS,
    COMMON_FIELDS,
    EXLLAMA_PAGE_TOKENS,
    GPU_BACKENDS,
    LOAD,
    SWITCHES,
    Field,
    ModelDefinition,
    count,
    find_field,
    gpu_number,
    owners_of,
    show_name,
)
from runner.definitions.settings import find_problem
from runner.errors import ConfigError, InvalidLoadRequest
from runner.limits import limits

CONTEXT_FIELDS: Mapping[str, str] = {"gguf": "gguf_n_ctx", "llama_server": "llama_server_n_ctx", "vllm": "vllm_max_model_len"}
"""The field that says how many tokens one request may have."""

CACHE_FIELDS: Mapping[str, str] = {"exllamav3": "exllama_cache_size", "tabbyapi": "exllama_cache_size"}
"""The field that says how many tokens all requests of a replica may have together."""

QUANTIZATIONS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("awq-4bit", "gptq-4bit", "fp16", "bf16"),
    "ct2": ("fp16", "bf16"),
    "whisper": ("fp16", "bf16"),
    "gguf": ("fp16", "bf16"),
}
"""Words of the model-runner specification that a backend can carry out, or, for gguf, that its files can be."""

_UNQUANTISED = frozenset({"fp32", "fp16", "bf16"})
_FILE_WORDS = {"f16": "fp16", "float16": "fp16", "bfloat16": "bf16", "f32": "fp32", "float32": "fp32"}
_COMPUTE_TYPES = {"fp16": "float16", "bf16": "bfloat16"}
_FILE_WORD = re.compile(r"i?q[0-9][a-z0-9_]{0,12}\Z")
_POSITIVE = Field(Annotated[int, count(1)])
_NEEDS_GPU = frozenset({"vllm", "tgi"})
"""Backends whose builds for a GPU do not work without one, and which are told that they have none when none is named."""
_PASSED_ON = ("device", "compute_type", "prompt_format", "enable_thinking", "revision")
_VLLM_VARIABLES: Mapping[str, str] = {
    "VLLM_MAX_MODEL_LEN": "vllm_max_model_len",
    "VLLM_GPU_MEMORY_UTILIZATION": "vllm_gpu_memory_utilization",
    "VLLM_ENABLE_PREFIX_CACHING": "vllm_enable_prefix_caching",
}


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a load stands: a few words, and the share that is done, from 0.0 to 1.0 (None = cannot be told yet)."""

    stage: str
    fraction: float | None = None


Report = Callable[[Progress], None]
"""Is told how a load goes on; cheap, never raises."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node of a replica over several: its runner id, where it is reached by the others, and the GPUs that it gives."""

    node: str
    address: str
    gpus: tuple[int, ...]

    @property
    def name(self) -> str:
        """What people call the node: its runner id without the fingerprint of its key."""
        return self.node.partition("#")[0]


@dataclass(frozen=True, slots=True)
class Cluster:
    """A replica over several nodes, as people approved it; the first member is the head. ``own``: this node.

    ``replica_id``: the use of the approval that it came of. ``digest``: of the statement. ``sign`` signs with the key of this
    node, whose public half (SPKI DER) is ``public_key``.
    """

    replica_id: str
    digest: str
    members: tuple[Member, ...]
    own: Member
    public_key: bytes = field(repr=False)
    sign: Callable[[bytes], bytes] = field(repr=False)

    @property
    def head(self) -> Member:
        return self.members[0]

    @property
    def is_head(self) -> bool:
        return self.own == self.head


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What one replica is to be. ``options`` are the backend's own fields, already checked against its constraints.

    ``path``: weights on this machine, None for a server of somebody else's. ``context_tokens`` is per request, None = the
    model's own. ``slots``: requests served at once by this replica. ``memory_budget_mb``: upper limit for the replica.
    ``cluster``: None = the replica is on this node alone.
    """

    model_id: str
    backend: str
    path: Path | None = None
    context_tokens: int | None = None
    slots: int = 1
    threads: int = 1
    gpu_ids: tuple[int, ...] = ()
    memory_budget_mb: int | None = None
    quantization: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    cluster: Cluster | None = None

    @property
    def nodes(self) -> int:
        """Over how many nodes the replica is; each has the same share of it."""
        return 1 if self.cluster is None else len(self.cluster.members)

    @property
    def is_reserved(self) -> bool:
        """Whether this node only holds a part of a replica that another node serves."""
        return self.cluster is not None and not self.cluster.is_head


@dataclass(frozen=True, slots=True)
class Observation:
    """What one replica really took once it was loaded: bytes of memory, predicted and measured, and seconds to load.

    ``plan_key`` tells loads of the same model with other settings apart. ``loaded_at`` is in Unix seconds.
    """

    backend: str
    model_id: str
    plan_key: str
    weights_bytes: int
    kv_bytes: int
    measured_bytes: int
    load_s: float
    loaded_at: float


def read_vllm_defaults(env: Mapping[str, str]) -> dict[str, object]:
    """Return the fields that the VLLM_* variables of the model-runner specification set; an empty one counts as unset.

    Raises ConfigError naming the variable.
    """
    found: dict[str, object] = {}
    for variable, name in _VLLM_VARIABLES.items():
        words = env.get(variable, "").strip()
        if not words:
            continue
        # The steps of a length are those of the override form only.
        known = _POSITIVE if name == "vllm_max_model_len" else BACKEND_FIELDS["vllm"][name]
        value: object
        try:
            if name == "vllm_enable_prefix_caching":
                value = SWITCHES.get(words.lower())
            else:
                value = int(words) if name == "vllm_max_model_len" else float(words)
        except ValueError:
            value = None
        if not known.accepts(value):
            raise ConfigError(f"{variable} must be {known.allowed()}, not {words[:40]!r}")
        found[name] = value
    return found


def check_overrides(definition: ModelDefinition, overrides: Mapping[str, object]) -> dict[str, object]:
    """Return the overrides of a load, checked; ``maxContextLength`` becomes the backend's own field where it has one.

    Keys are the override fields of the backend (llm-pool), ``quantization``, ``maxContextLength`` and ``gpuMemoryBudgetMB``
    (model-runner), and ``gpus``; null = not given. A key that is present, even with null, beats the definition.
    Raises InvalidLoadRequest with ``param``: the first field that cannot be used, its value and its limit.
    """
    checked: dict[str, object] = {}
    for name, value in overrides.items():
        if name in _RUNNER_CHECKS:
            if value is not None:
                checked |= _RUNNER_CHECKS[name](definition, value)
        else:
            checked[name] = _check_field(definition, name, value)
    _refuse_two_contexts(definition, overrides)
    problem = find_problem({**definition.options, **checked})
    if problem is not None:
        raise InvalidLoadRequest(f"{problem[0]} {problem[1]}.", param=problem[0])
    return checked


def load_constraints(definition: ModelDefinition) -> dict[str, dict[str, object]]:
    """Return what a load of this model may override, a constraint by field name.

    As ``Field.constraint`` has them, each with ``default``: what holds when the field is left out.
    """
    constraints: dict[str, dict[str, object]] = {}
    for name, known in _open_fields(definition).items():
        default = definition.options.get(name, known.default)
        if name in {"replicas", "target_inflight"}:
            default = getattr(definition, name)
        constraints[name] = {**known.constraint(), "default": default}
    return constraints


def load_recommendations(definition: ModelDefinition) -> dict[str, object]:
    """Return pairs of KV cache types that are worth trying, from the most exact to the smallest; none for most backends."""
    pairs: list[tuple[str, object, object]]
    match definition.backend:
        case "gguf":
            k, v = "gguf_type_k", "gguf_type_v"
            pairs = [
                ("exact", "f16", "f16"), ("about half the memory", "q8_0", "q8_0"),
                ("about two fifths of the memory", "q8_0", "q4_0"), ("under a third of the memory", "q4_0", "q4_0"),
            ]  # fmt: skip
        case "exllamav3" | "tabbyapi":
            k, v = "exllama_cache_k_bits", "exllama_cache_v_bits"
            pairs = [
                ("exact", None, None), ("about half the memory", 8, 8), ("about three eighths of the memory", 8, 4),
                ("about a quarter of the memory", 4, 4),
            ]  # fmt: skip
        case _:
            return {}
    recommended = [{"label": label, k: one, v: other} for label, one, other in pairs]
    return {"kv_cache": {"kind": "pair_presets", "fields": [k, v], "recommended_pairs": recommended}}


def choose_gpus(
    definition: ModelDefinition, *, given: tuple[int, ...], found: tuple[int, ...], asked: tuple[int, ...] = (),
    free_mb: Mapping[int, int | None] | None = None,
) -> tuple[int, ...]:  # fmt: skip
    """Return the GPUs of one replica: of those ``given`` to the node, else of those ``found`` in it.

    ``asked``: those that a load names. Else they are what ``device`` means; without a device, or with ``auto``, the engine has
    those given, and one that cannot do without a GPU those found. Of these ``gpu_count`` takes the ones with the most
    ``free_mb``. Raises InvalidLoadRequest when something named is not there.
    """
    usable = given or found
    if asked:
        if missing := [index for index in asked if index not in usable]:
            raise InvalidLoadRequest(
                f"gpus: {definition.model_id} is to be loaded on GPU {_list_gpus(missing)}, and this node has "
                f"{_name_gpus(usable)} for it.",
                param="gpus",
            )
        return asked
    count, chosen = definition.gpu_count, _find_device(definition, given=given, found=found)
    if count is None:
        return chosen
    candidates = chosen or usable
    if len(candidates) < count:
        raise InvalidLoadRequest(
            f"gpu_count: the settings of {definition.model_id} say {count} GPUs, and this node has {_name_gpus(candidates)} "
            "for it; correct them.",
            param="gpu_count",
        )
    free = free_mb or {}
    return tuple(sorted(sorted(candidates, key=lambda index: (-(free.get(index) or 0), index))[:count]))


def _find_device(definition: ModelDefinition, *, given: tuple[int, ...], found: tuple[int, ...]) -> tuple[int, ...]:
    device = definition.device
    if device is None or device == "auto":
        return given or (found if definition.backend in _NEEDS_GPU else ())
    if device == "cpu":
        return ()
    usable, number = given or found, gpu_number(device)
    chosen = usable if number is None else tuple(index for index in usable if index == number)
    if not chosen:
        raise InvalidLoadRequest(
            f"device: the settings of {definition.model_id} say {device}, and this node has {_name_gpus(usable)} for it; "
            "correct them.",
            param="device",
        )
    return chosen


def _name_gpus(usable: Sequence[int]) -> str:
    return f"the GPUs {_list_gpus(usable)}" if usable else "no GPU"


def _list_gpus(gpus: Iterable[int]) -> str:
    return ", ".join(map(str, gpus))


def asked_gpus(overrides: Mapping[str, object]) -> tuple[int, ...]:
    """Return the GPUs that checked overrides name, none when they name none."""
    asked = overrides.get("gpus")
    return tuple(asked) if isinstance(asked, list | tuple) else ()


def make_plan(
    definition: ModelDefinition, *, overrides: Mapping[str, object], path: Path | None, threads: int,
    gpu_ids: tuple[int, ...], defaults: Mapping[str, str] | None = None, cluster: Cluster | None = None,
) -> LoadPlan:  # fmt: skip
    """Return what one replica is to be: the definition, ``overrides`` as ``check_overrides`` returned them over it.

    ``defaults`` are environment variables; those of vLLM hold where nobody says otherwise (ConfigError for a bad one).
    The plan's options have no nulls; device, compute_type, prompt_format, enable_thinking and revision are among them.
    """
    backend = definition.backend
    options: dict[str, object] = read_vllm_defaults(defaults or {}) if backend == "vllm" else {}
    options |= {name: getattr(definition, name) for name in _PASSED_ON}
    options |= definition.options
    options |= {name: value for name, value in overrides.items() if name in BACKEND_FIELDS[backend]}
    if backend == "comfyui" and definition.model_path and not options.get("server_model"):
        options["server_model"] = PurePath(definition.model_path).name  # what is fetched there is called so
    slots = _int(overrides.get("target_inflight")) or definition.target_inflight
    quantization = overrides.get("quantization")
    if backend in {"ct2", "whisper"} and quantization is not None:
        options["compute_type"] = _COMPUTE_TYPES[str(quantization)]
    context = _int(overrides.get("maxContextLength"))
    if backend in CACHE_FIELDS:
        size = CACHE_FIELDS[backend]
        if context is not None:
            options[size] = -(-context * slots // EXLLAMA_PAGE_TOKENS) * EXLLAMA_PAGE_TOKENS
        cache = _int(options.get(size))
        context = context or (None if cache is None else max(1, cache // slots))
    elif backend in CONTEXT_FIELDS:
        context = _int(options.get(CONTEXT_FIELDS[backend]))
    return LoadPlan(
        model_id=definition.model_id,
        backend=backend,
        path=path,
        context_tokens=context,
        slots=slots,
        threads=threads,
        gpu_ids=gpu_ids,
        memory_budget_mb=_int(overrides.get("gpuMemoryBudgetMB")),
        quantization=None if quantization is None else str(quantization),
        options={name: value for name, value in options.items() if value is not None},
        cluster=cluster,
    )


def find_conflicts(
    plan: LoadPlan, asked: Mapping[str, object], *, replicas: int, context_tokens: int | None, files: str | None
) -> dict[str, tuple[object, object]]:
    """Return what is asked for otherwise than ``plan``, by which the model is loaded: name to (in force, asked).

    ``asked``: overrides as ``check_overrides`` returned them; what they do not name may be anything. ``context_tokens``: what
    one request has, as the engine says; ``files``: the quantisation of the files. None = not known, which nothing equals.
    """
    found: dict[str, tuple[object, object]] = {}
    for name, value in asked.items():
        known = find_field(plan.backend, name)
        default = known.default if known is not None else None
        held: object
        match name:
            case "replicas":
                held = replicas
            case "target_inflight":
                held = plan.slots
            case "gpuMemoryBudgetMB":
                held = plan.memory_budget_mb
            case "gpus":
                held = plan.gpu_ids
            case "quantization":
                held = plan.quantization or files
                if held is not None and _is_quantization(str(held), str(value)):
                    continue
            case "maxContextLength":
                held = plan.context_tokens or context_tokens
            case _:
                held = plan.options.get(name)
                if held is None and name == CONTEXT_FIELDS.get(plan.backend):
                    held = context_tokens
        held, wanted = (default if held is None else held), (default if value is None else value)
        if held != wanted:
            found[name] = (held, wanted)
    return found


def plan_key(plan: LoadPlan) -> str:
    """Return 16 hex digits that are the same for plans that take the same memory, whenever and wherever they are made."""
    options = {name: value for name, value in plan.options.items() if _changes_memory(plan.backend, name, value)}
    parts = [
        plan.backend, plan.context_tokens, plan.slots, plan.quantization, plan.memory_budget_mb, len(plan.gpu_ids), options,
        *((plan.nodes, plan.is_reserved) if plan.cluster is not None else ()),
    ]  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:16]


def check_quantization(plan: LoadPlan, files: str | None) -> None:
    """Compare what a load asks for with what the files are: a word such as awq-4bit, fp16, Q8_0, or None = cannot be told.

    Raises InvalidLoadRequest: quantised files cannot be loaded as anything else, and others are not quantised by a load.
    """
    wanted = plan.quantization
    if wanted is None or files is None or plan.backend in {"ct2", "whisper"}:  # CTranslate2 converts any to any
        return
    found = _FILE_WORDS.get(files.lower(), files.lower())
    if not _is_quantization(files, wanted) and not (plan.backend == "vllm" and {found, wanted} <= _UNQUANTISED):
        raise InvalidLoadRequest(
            f"quantization: {_shown(wanted)} was asked for, but the files of {plan.model_id} are {files}; "
            "leave quantization out, or fetch files of that kind.",
            param="quantization",
        )


def _is_quantization(files: str, wanted: str) -> bool:
    found = _FILE_WORDS.get(files.lower(), files.lower())
    return found == wanted or wanted.startswith(f"{found}-")


def describe(definition: ModelDefinition) -> dict[str, object]:
    """Return a definition for listings, in the field names of the settings. Of keys it has the variables' names only."""
    values: dict[str, object] = msgspec.structs.asdict(definition)
    options = values.pop("options")
    assert isinstance(options, dict)
    return {**values, **options}


def _open_fields(definition: ModelDefinition) -> dict[str, Field]:
    backend = definition.backend
    if backend == "attached":
        return {}
    # A llama-server that is running already was started with its own.
    own = {} if backend == "llama_server" and "server_url" in definition.options else BACKEND_FIELDS[backend]
    found = {name: known for name, known in {**COMMON_FIELDS, **own}.items() if known.is_override}
    return found | {"replicas": Field(Annotated[int, LOAD, count(1, definition.replica_max, unit="replicas")])}


def _check_field(definition: ModelDefinition, name: str, value: object) -> object:
    fields = _open_fields(definition)
    if name not in fields:
        raise InvalidLoadRequest(
            f"{show_name(name)} {_why_unknown(definition, name, list(fields))}", param=name[: limits().models.shown_chars]
        )
    return _check_value(name, value, fields[name])


def _check_value(name: str, value: object, known: Field) -> object:
    if not known.accepts(value):
        raise _not_allowed(name, value, f"it must be {known.allowed()}.")
    return value


def _not_allowed(name: str, value: object, why: str) -> InvalidLoadRequest:
    return InvalidLoadRequest(f"{name}: {_shown(value)} is not allowed; {why}", param=name)


def _why_unknown(definition: ModelDefinition, name: str, known: list[str]) -> str:
    found = find_field(definition.backend, name)
    if definition.backend != "attached" and found is not None and found.is_override:
        why = f"is fixed by the server that {definition.model_id} is on, which was started with it"
    elif found is not None:
        why = "is set in the settings and not by a load"
    elif owners := owners_of(name):
        why = f"is a field of {', '.join(owners)}, and {definition.model_id} runs on {definition.backend}"
    else:
        why = "is not a field of any backend"
    return f"{why}; a load of this model may set {', '.join(known) or 'nothing'}."


def _check_quantization_word(definition: ModelDefinition, value: object) -> dict[str, object]:
    name, words = "quantization", QUANTIZATIONS.get(definition.backend, ())
    if not words:
        raise _not_allowed(name, value, f"{definition.backend} loads files as they are, leave it out.")
    if definition.backend == "gguf" and isinstance(value, str) and _FILE_WORD.match(value):
        return {name: value}  # the files' own word, as the listings show it; compared with them before the load
    if value not in words:
        raise _not_allowed(name, value, f"it must be one of {', '.join(words)}.")
    return {name: value}


def _check_context(definition: ModelDefinition, value: object) -> dict[str, object]:
    name, backend = "maxContextLength", definition.backend
    own, fields = CONTEXT_FIELDS.get(backend), _open_fields(definition)
    if own in fields:
        return {own: _check_value(name, value, fields[own])}
    if backend in CACHE_FIELDS or backend == "ct2":
        return {name: _check_value(name, value, _POSITIVE)}
    raise _not_allowed(name, value, f"the context of a {backend} model is its own, leave it out.")


def _check_budget(definition: ModelDefinition, value: object) -> dict[str, object]:
    name = "gpuMemoryBudgetMB"
    if definition.backend in {"openai_compatible", "attached"}:
        raise _not_allowed(name, value, f"{definition.model_id} takes no memory of this node, leave it out.")
    return {name: _check_value(name, value, _POSITIVE)}


def _check_gpus(definition: ModelDefinition, value: object) -> dict[str, object]:
    name = "gpus"
    if definition.backend not in GPU_BACKENDS:
        raise _not_allowed(name, value, f"the GPUs of a {definition.backend} model are not chosen by a load, leave it out.")
    if definition.device == "cpu":
        raise _not_allowed(name, value, f"the settings of {definition.model_id} say device cpu.")
    numbers = value if isinstance(value, list | tuple) else ()
    is_index = all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < limits().models.gpus for one in numbers)
    if not numbers or not is_index or len(set(numbers)) < len(numbers) or len(numbers) > limits().models.gpus:
        raise _not_allowed(name, value, "it must be a list of numbers of GPUs of this node, each once.")
    return {name: tuple(numbers)}


_RUNNER_CHECKS = {
    "quantization": _check_quantization_word,
    "maxContextLength": _check_context,
    "gpuMemoryBudgetMB": _check_budget,
    "gpus": _check_gpus,
}


def _refuse_two_contexts(definition: ModelDefinition, overrides: Mapping[str, object]) -> None:
    own = CONTEXT_FIELDS.get(definition.backend) or CACHE_FIELDS.get(definition.backend)
    if own in overrides and overrides.get("maxContextLength") is not None:
        raise InvalidLoadRequest(f"maxContextLength and {own} say the same thing; give one of them.", param="maxContextLength")


def _changes_memory(backend: str, name: str, value: object) -> bool:
    known = find_field(backend, name)
    return known is None or (known.uses_memory and value != known.default)


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _shown(value: object) -> str:
    text = json.dumps(value, default=lambda other: type(other).__name__)
    return text if len(text) <= limits().models.shown_chars else text[: limits().models.shown_chars - 1] + "…"
