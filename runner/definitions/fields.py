"""Every field of a model and of decoding: its type with limits, which backend knows it, whether a load may override it.

Each is declared once, as a type with the limits of ``msgspec.Meta``. From there come checks, error texts, the limits that a
client is told and the keys of measured memory. Pure.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, inspect

from runner.limits import MIB, limits

MAX_INTEGER = (1 << 53) - 1
"""Larger whole numbers do not survive every JSON parser (RFC 8259 section 6)."""
EXLLAMA_PAGE_TOKENS = 256
"""Its cache is made of pages of this size (PAGE_SIZE of ExLlamaV3)."""
TRANSLATABLE: dict[str, str] = {"messages": "/v1/messages", "responses": "/v1/responses"}
"""Surfaces that a gateway can say in chat completions, by the words of the settings, and their API paths."""

_MODEL_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:@+-]|/(?!\.))*", re.ASCII)
_DEVICE = re.compile(r"cpu|auto|cuda(?::([0-9]{1,3}))?")
SWITCHES = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
"""What a variable of the environment may say for true and false, in small letters."""

SettingsBackend = Literal[
    "gguf", "llama_server", "ct2", "whisper", "vllm", "exllamav3", "tabbyapi", "tgi", "comfyui", "openai_compatible",
]  # fmt: skip
Backend = Literal[SettingsBackend, "attached"]
"""``attached`` is not for settings files: a model of the server given with ``--backend``."""
BACKENDS: tuple[str, ...] = get_args(SettingsBackend)
GPU_BACKENDS = frozenset({"gguf", "vllm", "exllamav3", "tgi"})
"""Backends that put one replica on several GPUs: the node tells them which."""
KvType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
KV_TYPES: tuple[str, ...] = get_args(KvType)
"""Types of a llama.cpp KV cache."""


def is_model_id(text: str) -> bool:
    """Return whether a text can name a model: letters, digits and ``. _ : @ + - /``, no part that begins with a dot."""
    return len(text) <= limits().models.id_chars and _MODEL_ID.fullmatch(text) is not None and not text.endswith("/")


def is_http_url(text: str) -> bool:
    """Return whether it is the address of an HTTP server, without credentials, query or fragment."""
    try:
        parts = urlsplit(text)
        is_complete = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    return is_complete and parts.username is None and not parts.query and not parts.fragment and " " not in text


def gpu_number(device: str) -> int | None:
    """Return the number in ``cuda:N``, None where a device names none."""
    match = _DEVICE.fullmatch(device)
    return None if match is None or match[1] is None else int(match[1])


def type_name(value: object) -> str:
    """Return what a value out of JSON is, in a word or two that never show the value itself."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"


def show_name(name: str) -> str:
    """Return a name that somebody gave as a refusal may repeat it."""
    return name if name.isprintable() and len(name) <= limits().models.shown_chars else "(a name)"


# How fields are declared. What msgspec has no word for stands in ``extra``.

LOAD = Meta(extra={"is_override": True})
"""A load may give another value."""
PLAIN = Meta(extra={"uses_memory": False})
"""Its value does not change what memory a load takes."""
REQUIRED = Meta(extra={"uses_memory": False, "is_required": True})


def count(least: int, most: int = MAX_INTEGER, *, unit: str = "count", step: int | None = None, display: str = "") -> Meta:
    """Return the limits of a whole number. ``step``: only its multiples are allowed, of which ``least`` is one."""
    return Meta(ge=least, le=most, multiple_of=step, extra={"unit": unit, "display_unit": display or unit})


def number(least: float, most: float = sys.float_info.max) -> Meta:
    return Meta(ge=least, le=most)


def text(what: str, pattern: str = "", **extra: object) -> Meta:
    """Return the limits of a string of one line that is not empty; ``what`` says in words what ``pattern`` is.

    ``extra``: ``is_valid`` is a further test. With ``has_line_ends``, of a field, they and the like are fine in its strings.
    """
    return Meta(min_length=1, pattern=rf"\A(?:{pattern})\Z" if pattern else None, description=what, extra=extra)


POSITIVE = Meta(gt=0, le=sys.float_info.max)
_URL = text("an address such as https://host:port/v1 without credentials, query or fragment", is_valid=is_http_url)
_VARIABLE = text("the name of an environment variable (the value stays in the environment)", "[A-Za-z_][A-Za-z0-9_]{0,127}")
_PATH = text("a path")


class ModelDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configured model, defaults filled in. ``options`` holds the backend's own fields under their full names.

    ``translate``: words of TRANSLATABLE; gateways are not told that the engine answers those, so they translate. ``tidy``:
    whether chunks of its chat streams are put right for strict clients; None = where the engine is known to need it.
    ``gpu_count``: how many GPUs one replica takes, those with the most free memory; None = all that the node may use.
    ``prompt_format`` is more than a model's own chat template: one has a switch for thinking, and one translates.
    """

    model_id: str
    backend: Annotated[Backend, PLAIN]
    model_path: Annotated[str, PLAIN, text("a path or a model id")] | None = None
    device: Annotated[str, text("cpu, cuda, cuda:N (a GPU of the node by its number) or auto", _DEVICE.pattern)] | None = None
    gpu_count: Annotated[int, PLAIN, count(1, 64, unit="GPUs")] | None = None
    compute_type: (
        Literal[
            "default", "auto", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16",
            "float32",
        ]
        | None
    ) = None  # fmt: skip
    prompt_format: Annotated[Literal["gemma4_template", "translategemma_template"], PLAIN] | None = None
    enable_thinking: Annotated[bool, PLAIN] | None = None
    enabled: Annotated[bool, PLAIN] = False
    replicas: Annotated[int, LOAD, PLAIN, count(1, 64, unit="replicas")] = 1
    replica_max: Annotated[int, PLAIN, count(1, 64, unit="replicas")] = 1
    # It uses memory, and is the plan's ``slots``, which is in every key of a plan.
    target_inflight: Annotated[int, LOAD, PLAIN, count(1, 1024, unit="requests")] = 1
    revision: Annotated[str, PLAIN, text("a revision of the model's repository")] | None = None
    translate: Annotated[
        tuple[Annotated[str, text(" or ".join(TRANSLATABLE), "|".join(TRANSLATABLE))], ...],
        PLAIN, Meta(max_length=64),
    ] = ()  # fmt: skip
    tidy: Annotated[bool, PLAIN] | None = None
    options: dict[str, object] = {}
    is_configured: bool = True
    """False: found among the model files, not described in the settings."""


class _Server(msgspec.Struct, kw_only=True):
    server_url: Annotated[str, REQUIRED, _URL]
    server_api_key_env: Annotated[str, PLAIN, _VARIABLE] | None
    server_model: Annotated[str, PLAIN, text("the model's name on that server")] | None


class _ExllamaCache(msgspec.Struct, kw_only=True):
    exllama_cache_size: Annotated[int, LOAD, count(EXLLAMA_PAGE_TOKENS, step=EXLLAMA_PAGE_TOKENS, unit="tokens")]
    exllama_cache_quant: (
        Annotated[str, LOAD, text('"bits" or "k,v" with 2 to 8 bits each, such as "8,4"', "[2-8](?:,[2-8])?")] | None
    )
    exllama_cache_k_bits: Annotated[int, LOAD, count(2, 8, unit="bits")] | None
    exllama_cache_v_bits: Annotated[int, LOAD, count(2, 8, unit="bits")] | None
    exllama_tensor_parallel: bool
    exllama_gpu_split: (
        Annotated[str, text('sizes in GB such as "24,24"', r" *(?:\d+\.?\d*|\.\d+) *(?:, *(?:\d+\.?\d*|\.\d+) *)*")] | None
    )


class _Gguf(msgspec.Struct, kw_only=True):
    gguf_n_ctx: Annotated[int, LOAD, count(1, unit="tokens")]
    gguf_flash_attn: Annotated[Literal["on", "off", "auto"], LOAD] = "auto"
    gguf_type_k: Annotated[KvType, LOAD] = "f16"
    gguf_type_v: Annotated[KvType, LOAD] = "f16"
    gguf_n_gpu_layers: Annotated[int, count(-1, 4096, unit="layers")] = -1
    gguf_embedding: bool = False


class _LlamaServer(msgspec.Struct, kw_only=True):
    llama_server_n_ctx: Annotated[int, LOAD, count(1, unit="tokens")]
    llama_server_image_max_tokens: Annotated[int, LOAD, count(1, unit="tokens")] | None
    llama_server_spec_type: Annotated[str, LOAD, text("a kind of speculation")] | None
    llama_server_spec_draft_n_max: Annotated[int, LOAD, count(1, 6, unit="tokens")] | None
    llama_server_spec_draft_p_min: Annotated[float, LOAD, number(0.0, 1.0)] | None


class _Whisper(msgspec.Struct, kw_only=True):
    max_upload_mb: Annotated[int, PLAIN, count(1, 4096, unit="MiB")]


class _Vllm(msgspec.Struct, kw_only=True):
    vllm_max_model_len: Annotated[int, LOAD, count(256, step=256, unit="tokens")]
    vllm_kv_cache_dtype: Annotated[Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"], LOAD] = "auto"
    vllm_kv_cache_memory_bytes: Annotated[int, LOAD, count(256 * MIB, step=256 * MIB, unit="bytes", display="MiB")] | None
    vllm_max_pixels: Annotated[int, LOAD, count(200704, step=200704, unit="pixels")] | None
    vllm_speculative_method: Annotated[str, LOAD, text("a speculation method of vLLM")] | None
    vllm_speculative_model: Annotated[str, LOAD, text("a path or a model id")] | None
    vllm_speculative_moe_backend: Annotated[str, LOAD, text("a MoE backend of vLLM")] | None
    vllm_speculative_attention_backend: Annotated[str, LOAD, text("an attention backend of vLLM")] | None
    vllm_num_speculative_tokens: Annotated[int, LOAD, count(1, unit="tokens")] | None
    vllm_gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)]
    vllm_enable_prefix_caching: bool = True
    vllm_enforce_eager: bool = False
    vllm_enable_sleep_mode: bool = False
    vllm_lora: Annotated[dict[str, Annotated[str, _PATH]], Meta(max_length=64)]
    vllm_max_num_batched_tokens: Annotated[int, count(1, unit="tokens")]
    vllm_task: Literal["generate", "embed"] = "generate"
    vllm_tool_call_parser: Annotated[str, PLAIN, text("a tool call parser of vLLM")] | None
    vllm_reasoning_parser: Annotated[str, PLAIN, text("a reasoning parser of vLLM")] | None
    vllm_max_lora_rank: Annotated[int, count(1, 512, unit="dimensions")]


class _Exllamav3(msgspec.Struct, kw_only=True):
    exllama_max_rq_tokens: Annotated[int, LOAD, count(1, unit="tokens")] | None
    exllama_tp_backend: Literal["native", "nccl"] | None
    exllama_max_batch_size: Annotated[int, count(1, 4096, unit="requests")]
    exllama_max_chunk_size: Annotated[int, count(256, unit="tokens")]
    exllama_max_q_size: Annotated[int, count(1, 4096, unit="tokens")]


class _Tabbyapi(msgspec.Struct, kw_only=True):
    server_admin_key_env: Annotated[str, PLAIN, _VARIABLE] | None


class _Tgi(msgspec.Struct, kw_only=True):
    server_url: Annotated[str, PLAIN, _URL]
    tgi_launcher: Annotated[str, PLAIN, _PATH]
    tgi_adapters: Annotated[tuple[Annotated[str, text("the name of an adapter")], ...], PLAIN, Meta(max_length=64)]
    tgi_prefix_caching: Annotated[bool, PLAIN]


class _Comfyui(msgspec.Struct, kw_only=True):
    comfyui_workflow: Annotated[str, PLAIN, _PATH]
    comfyui_checkpoints_dir: Annotated[str, PLAIN, _PATH]


class _OpenaiCompatible(msgspec.Struct, kw_only=True):
    remote_base_url: Annotated[str, REQUIRED, _URL]
    remote_api_kind: Annotated[Literal["chat_completions"], PLAIN] = "chat_completions"
    remote_api_key_env: Annotated[str, PLAIN, _VARIABLE] | None
    remote_model: Annotated[str, PLAIN, text("the model's name at the provider")] | None
    remote_timeout_s: Annotated[float, PLAIN, number(1.0, 3600.0)] = 120
    remote_health_check: Annotated[Literal["config_only", "models", "completion"], PLAIN] = "config_only"
    remote_max_retries: Annotated[int, PLAIN, count(0, 5, unit="retries")] = 0
    remote_thinking: Annotated[Literal["enabled", "disabled"], PLAIN] | None


class Decoding(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen. ``max_tokens`` is the most that are generated; ``stop`` are further stop strings."""

    beam_size: Annotated[int, count(1, 16, unit="beams")] = 1
    top_k: Annotated[int, count(1, 200, unit="tokens")] = 1
    top_p: Annotated[float, number(0.0, 1.0)] = 1.0
    temperature: Annotated[float, number(0.0, 2.0)] = 0.1
    repetition_penalty: Annotated[float, POSITIVE] = 1.0
    max_tokens: Annotated[int, count(1, 4096, unit="tokens")] = 256
    stop: Annotated[
        tuple[Annotated[str, text("a string that is not empty", r"[^\ud800-\udfff]*")], ...],
        Meta(max_length=16, extra={"has_line_ends": True}),
    ] = ()  # fmt: skip


class Field:
    """One field, as its type says: what it accepts, what a reader and a program are told of its limits.

    ``kind`` is a type of msgspec; ``default`` is what the engine does when nobody says, None = its own choice.
    """

    def __init__(self, kind: Any, default: object = None) -> None:  # Any: a type, Annotated or a union, has no type of its own
        self._kind = kind
        self._type, facts = _strip(inspect.type_info(kind))
        self._words = _find_words(kind)
        self._is_nullable = "is_nullable" in facts
        self.default = default
        self.is_override = "is_override" in facts
        self.uses_memory = bool(facts.get("uses_memory", True))
        self.is_required = "is_required" in facts
        self._facts = facts

    def accepts(self, value: object) -> bool:
        try:
            msgspec.convert(value, self._kind)
        except (msgspec.ValidationError, UnicodeEncodeError):  # the last for half of a surrogate pair
            return False
        return self._is_clean(value)

    def _is_clean(self, value: object) -> bool:
        match value:
            case str():
                if len(value) > limits().models.text_chars or not (value.isprintable() or "has_line_ends" in self._facts):
                    return False
                is_valid = self._facts.get("is_valid")
                return is_valid is None or bool(is_valid(value))
            case list():
                return all(map(self._is_clean, value))
            case Mapping():
                return all(is_model_id(name) and self._is_clean(text) for name, text in value.items())
            case _:
                return True

    def allowed(self) -> str:
        """Return what is allowed, to follow "must be"."""
        said = f"one of {', '.join(self._words)}" if self._words else _describe(self._type, self._facts)
        return said + (", or null" if self._is_nullable else "")

    def constraint(self) -> dict[str, object]:
        """Return the same for machines; ``kind`` is a word of the llm-pool specification.

        integer and integer_or_null {minimum, maximum?, step, unit, display_unit}, number and number_or_null {minimum,
        maximum?}, enum {allowed_values}, string and string_or_null {format}.
        """
        kind: str
        facts: dict[str, object]
        match self._type:
            case inspect.IntType(ge=least, le=most):
                kind, facts = "integer", {"minimum": least}
                if most != MAX_INTEGER:
                    facts["maximum"] = most
                facts |= {"step": self._type.multiple_of or 1}
                facts |= {name: self._facts[name] for name in ("unit", "display_unit")}
            case inspect.FloatType(ge=least, le=most):
                kind, facts = "number", {"minimum": least, "maximum": most}
            case inspect.LiteralType():
                return {"kind": "enum", "allowed_values": [*self._words, None] if self._is_nullable else list(self._words)}
            case _:
                kind, facts = "string", {"format": self._facts["description"]}
        return {"kind": f"{kind}_or_null" if self._is_nullable else kind, **facts}


def _strip(info: inspect.Type) -> tuple[inspect.Type, dict[str, Any]]:
    """Return a type without what is said about it, and that: what ``Meta`` holds, and whether null is allowed."""
    facts: dict[str, Any] = {}
    while True:
        match info:
            case inspect.Metadata():
                facts |= (info.extra or {}) | (info.extra_json_schema or {})
                info = info.type
            case inspect.UnionType():
                facts["is_nullable"] = True
                [info] = [one for one in info.types if not isinstance(one, inspect.NoneType)]
            case _:
                return info, facts


def _find_words(kind: Any) -> tuple[str, ...]:
    # ``inspect`` sorts the words of a Literal; a reader has them in the order of their declaration.
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((words for one in get_args(kind) if (words := _find_words(one))), ())


def _describe(info: inspect.Type, facts: Mapping[str, Any]) -> str:
    if "description" in facts:
        return str(facts["description"])
    match info:
        case inspect.IntType(ge=least, le=most, multiple_of=step):
            bounds = _range(least or 0, None if most == MAX_INTEGER else most)
            return f"a whole number {bounds}" + (f" in steps of {step}" if step else "")
        case inspect.FloatType(gt=None, ge=least, le=most):
            return f"a number {_range(least or 0, None if most == sys.float_info.max else most)}"
        case inspect.FloatType(gt=least, le=most):
            return f"a number above {least:g}" + ("" if most == sys.float_info.max else f" and at most {most:g}")
        case inspect.VarTupleType(item_type=item, max_length=most):
            return f"a list of at most {most} items, each {_describe(*_strip(item))}"
        case inspect.DictType(value_type=item, max_length=most):
            return f"an object of at most {most} names, each with {_describe(*_strip(item))}"
        case _:
            return "true or false"


def _range(least: float, most: float | None) -> str:
    return f"from {least:.12g} to {most:.12g}" if most is not None else f"of at least {least:.12g}"


def fields_of(*sections: type[msgspec.Struct]) -> dict[str, Field]:
    """Return what structs declare, by name; a later one wins."""
    return {
        one.name: Field(one.type, None if one.default is msgspec.NODEFAULT else one.default)
        for section in sections
        for one in msgspec.structs.fields(section)
    }


COMMON_FIELDS: Mapping[str, Field] = {
    name: Field(Annotated[SettingsBackend, PLAIN]) if name == "backend" else one
    for name, one in fields_of(ModelDefinition).items()
    if name not in {"model_id", "options", "is_configured"}
}
"""Fields of every backend."""

BACKEND_FIELDS: Mapping[str, Mapping[str, Field]] = {
    "gguf": fields_of(_Gguf),
    "llama_server": fields_of(_Server, _LlamaServer),
    "ct2": {},
    "whisper": fields_of(_Whisper),
    "vllm": fields_of(_Vllm),
    "exllamav3": fields_of(_ExllamaCache, _Exllamav3),
    "tabbyapi": fields_of(_Server, _Tabbyapi, _ExllamaCache),
    "tgi": fields_of(_Server, _Tgi),
    "comfyui": fields_of(_Server, _Comfyui),
    "openai_compatible": fields_of(_OpenaiCompatible),
    "attached": {},
}
"""The fields of each backend beside the common ones; limits are those of the llm-pool admin API where it has the field."""

DECODING_FIELDS: Mapping[str, Field] = fields_of(Decoding)


def find_field(backend: str, name: str) -> Field | None:
    """Return what a backend's field is, a common one included; None when it does not know the name."""
    return BACKEND_FIELDS[backend].get(name) or COMMON_FIELDS.get(name)


def owners_of(name: str) -> tuple[str, ...]:
    """Return the backends that have a field of this name, none when it does not exist."""
    return tuple(backend for backend, known in BACKEND_FIELDS.items() if name in known)


def merge_decoding(defaults: Decoding, given: Mapping[str, object]) -> Decoding:
    values: dict[str, object] = {**msgspec.structs.asdict(defaults), **given}
    return msgspec.convert(values, Decoding)
