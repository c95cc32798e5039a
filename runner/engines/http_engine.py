"""What the adapters of HTTP servers share."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from runner.definitions.plan import LoadPlan
from runner.engines.http import HttpServer
from runner.engines.port import TOKENIZE
from runner.errors import EngineError, InvalidRequest
from runner.limits import limits
from wire.unreadable import UNREADABLE

Value = TypeVar("Value")

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_kwargs_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


def read_url(plan: LoadPlan, *, example: str) -> str:
    """Return ``server_url`` up to, not including, ``/v1``. Raises EngineError that shows ``example``."""
    url = read_option(plan.options, "server_url", str) or ""
    if not url.startswith(("http://", "https://")):
        raise EngineError(f"{plan.model_id} needs server_url, like {example}")
    return url.rstrip("/").removesuffix("/v1")


def read_key(plan: LoadPlan, option: str) -> str:
    """Return the key in the variable that ``option`` names, empty when it names none.

    Raises EngineError naming the variable when that is empty or holds what cannot be a key.
    """
    name = read_option(plan.options, option, str)
    if not name:
        return ""
    key = os.environ.get(name, "").strip()
    if not key:
        raise EngineError(f"{plan.model_id}: the environment variable {name} ({option}) is empty")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise EngineError(f"{plan.model_id}: what {name} ({option}) holds cannot be a key: it has spaces or special characters")
    return key


def set_thinking(plan: LoadPlan, body: bytes) -> bytes:
    """Return the body of a chat completion in which ``enable_thinking`` of the plan holds where the client says nothing.

    For servers that were started without it; a body that is no JSON object is theirs to refuse.
    """
    wanted = plan.options.get("enable_thinking")
    if wanted is None:
        return body
    try:
        fields = _fields_decoder.decode(body)
        given = _kwargs_decoder.decode(fields.get("chat_template_kwargs", b"null")) or {}
    except UNREADABLE:
        return body
    if "enable_thinking" in given:
        return body
    kwargs = {**given, "enable_thinking": wanted}
    return msgspec.json.encode({**fields, "chat_template_kwargs": kwargs})


def bearer(plan: LoadPlan, option: str = "server_api_key_env") -> dict[str, str]:
    """Return the header with that key, none when the plan names no variable. Raises EngineError as ``read_key``."""
    key = read_key(plan, option)
    return {"Authorization": f"Bearer {key}"} if key else {}


_REFUSALS = frozenset({400, 413, 422})


class _Reason(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    """An error answer: OpenAI's object, the text of TGI, or a bare message."""

    error: _Reason | str | None = None
    message: str = ""


class _Counted(msgspec.Struct):
    count: int


class _InputTokens(msgspec.Struct):
    input_tokens: int


class _Tokens(msgspec.Struct):
    tokens: list[msgspec.Raw]


class _Prompt(msgspec.Struct):
    prompt: str


_counted_decoder = msgspec.json.Decoder(_Counted)
_input_decoder = msgspec.json.Decoder(_InputTokens)
_tokens_decoder = msgspec.json.Decoder(_Tokens)
_prompt_decoder = msgspec.json.Decoder(_Prompt)
_refusal_decoder = msgspec.json.Decoder(_Refusal)


def take_answer(path: str, status: int, body: bytes) -> bytes:
    """Return the body of a good answer. Raises InvalidRequest with the engine's reason, EngineError for any other failure."""
    if status == 200:
        return body
    if status in _REFUSALS:
        raise InvalidRequest(_read_reason(body) or "The engine does not accept this prompt.")
    raise EngineError(f"{path} answers HTTP {status}")


async def ask_count(server: HttpServer, path: str, fields: Mapping[str, msgspec.Raw]) -> int:
    """Ask an engine that answers ``{"count": …}``. Raises InvalidRequest, EngineError."""
    status, body = await server.ask("POST", path, body=fields, timeout_s=limits().engines.count_s)
    try:
        return _counted_decoder.decode(take_answer(path, status, body)).count
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise EngineError(f"{path} answers with something else than a count") from None


async def ask_child(server: HttpServer, fields: Mapping[str, msgspec.Raw]) -> int:
    """Ask a child process of ours. Raises InvalidRequest, EngineError."""
    return await ask_count(server, TOKENIZE, fields)


async def ask_llama(server: HttpServer, fields: Mapping[str, msgspec.Raw]) -> int:
    """Ask llama.cpp, for messages as it counts them itself, pictures included. Raises InvalidRequest, EngineError.

    Servers from before the middle of 2026 do not count messages: of those the template and the tokenizer are asked.
    """
    if "messages" not in fields:
        return await _ask_llama_text(server, fields, fields["prompt"])
    path = "/v1/chat/completions/input_tokens"
    status, body = await server.ask("POST", path, body=fields, timeout_s=limits().engines.count_s)
    try:
        if status != 404:
            return _input_decoder.decode(take_answer(path, status, body)).input_tokens
        path = "/apply-template"
        status, body = await server.ask("POST", path, body=fields, timeout_s=limits().engines.count_s)
        prompt = _prompt_decoder.decode(take_answer(path, status, body)).prompt
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise EngineError(f"{path} does not answer as llama.cpp does") from None
    return await _ask_llama_text(server, fields, msgspec.Raw(msgspec.json.encode(prompt)))


async def _ask_llama_text(server: HttpServer, fields: Mapping[str, msgspec.Raw], text: msgspec.Raw) -> int:
    """Count a text the way llama.cpp reads a prompt: with the special tokens in it, and the one that it begins with."""
    path = "/tokenize"
    asked: dict[str, object] = {"model": fields["model"], "content": text, "add_special": True, "parse_special": True}
    status, body = await server.ask("POST", path, body=asked, timeout_s=limits().engines.count_s)
    try:
        return len(_tokens_decoder.decode(take_answer(path, status, body)).tokens)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise EngineError(f"{path} answers with something else than tokens") from None


def _read_reason(body: bytes) -> str:
    try:
        refusal = _refusal_decoder.decode(body)
    except UNREADABLE:
        return ""
    error = refusal.error
    reason = error if isinstance(error, str) else error.message if error is not None else refusal.message
    return reason[: limits().engines.said_chars]


_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_SHOWN: frozenset[str] = frozenset({
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason", "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc", "vllm:num_preemptions", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits",
    "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success", "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds", "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
    "tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens", "tgi_request_count", "tgi_request_success",
    "tgi_request_failure", "tgi_request_queue_duration", "tgi_request_inference_duration",
    "tgi_request_mean_time_per_token_duration", "tgi_request_generated_tokens", "tgi_request_input_length",
    "llamacpp:requests_processing", "llamacpp:requests_deferred", "llamacpp:n_busy_slots_per_decode",
    "llamacpp:prompt_tokens", "llamacpp:tokens_predicted", "llamacpp:prompt_seconds", "llamacpp:tokens_predicted_seconds",
})  # fmt: skip
"""Families that are shown, less the ``_total`` of counters; none of ours is called so (with ``vllm`` ours go on with ``_``)."""
_ENDINGS = ("_total", "_bucket", "_sum", "_count")
_KEPT_LABELS = frozenset({"le", "quantile", "reason", "finished_reason", "err", "engine"})
"""What tells samples of a model apart; whatever else an engine labels is dropped, and ``model`` and ``replica`` are added."""
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one scrape: name to values, with the labels of each."""

    found: dict[str, list[tuple[dict[str, str], float]]]

    def total(self, *names: str) -> float | None:
        """Return the sum over all labels of the first of ``names`` that is there, or None."""
        for name in names:
            if name in self.found:
                return sum(value for _, value in self.found[name])
        return None

    def count(self, *names: str) -> int | None:
        """Return ``total`` as a whole number."""
        found = self.total(*names)
        return None if found is None else int(found)

    def labels(self, name: str) -> dict[str, str]:
        """Return the labels of the first sample called ``name``; nothing when there is none."""
        return next((labels for labels, _ in self.found.get(name, [])), {})


def read_samples(text: str, prefix: str) -> Samples:
    """Return the samples whose names begin with ``prefix``; buckets, other lines and values that are no number are left out."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in _parse_lines(text, prefix):
        found.setdefault(name, []).append((labels, value))
    return Samples(found)


def _parse_lines(text: str, prefix: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for line in text.splitlines():
        if not line.startswith(prefix) or "_bucket{" in line or (match := _SAMPLE.match(line)) is None:
            continue
        name, labels, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if value == value and value not in (float("inf"), float("-inf")):
            yield name, dict(_LABEL.findall(labels or "")), value


def show_series(texts: Iterable[tuple[str, int, str]]) -> list[Metric]:
    """Return the engines' own series: of each model, replica (from 0) and its metrics as text, those that are known.

    A text that is too long, or is none of this format, shows nothing. Samples beyond ``shown_samples`` are left out.
    """
    shown: dict[str, Metric] = {}
    seen: set[tuple[object, ...]] = set()
    for model, replica, text in texts:
        room = limits().engines.shown_samples
        for family in _read_families(text):
            mine = shown.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            if mine.type != family.type:
                continue
            for sample in family.samples[:room]:
                kept = {name: value for name, value in sample.labels.items() if name in _KEPT_LABELS}
                labels = {"model": model, "replica": str(replica), **kept}
                key = (sample.name, *sorted(labels.items()))
                if key not in seen:  # Prometheus refuses the whole page when two samples have the same labels
                    seen.add(key)
                    mine.add_sample(sample.name, labels, sample.value)
            room = max(0, room - len(family.samples))
    return list(shown.values())


def _read_families(text: str) -> list[Metric]:
    if len(text) > limits().engines.shown_bytes:
        return []
    known = "\n".join(line for line in text.splitlines() if _names_shown(line))
    try:
        return [family for family in text_string_to_metric_families(known + "\n") if family.samples]
    except ValueError:
        return []


def _names_shown(line: str) -> bool:
    """Return whether a line is a sample of a family that is shown, or tells its type or what it means."""
    words = line.split(None, 3)
    if line.startswith("#"):
        name = words[2] if len(words) > 2 and words[1] in {"TYPE", "HELP"} else ""
    else:
        name = line.partition("{")[0].split(" ", 1)[0]
    return name in _SHOWN or any(name.endswith(ending) and name.removesuffix(ending) in _SHOWN for ending in _ENDINGS)


def installed_version(distribution: str) -> str:
    """Return the version of a package that is installed beside this program, empty when it is not. Blocks on the disk."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def read_option(options: Mapping[str, object], name: str, kind: type[Value]) -> Value | None:
    """Return an option of a plan, None when it is not set. Raises EngineError when it has another type than ``kind``."""
    value = options.get(name)
    if value is None:
        return None
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise EngineError(f"{name} must be of type {kind.__name__}")
    return value
