"""Whether a process makes traces, which OpenTelemetry's own variables say, and the names that its spans carry.

Off, and then nothing of the SDK is imported, unless one of its standard variables names a collector. ``wire.spans`` has the
rest. Names of attributes are those of OpenTelemetry's semantic conventions for generative AI (semantic-conventions-genai
v0.1.0) and HTTP, and under ``muster.`` our own. No attribute holds anything of a prompt, an answer or a credential.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from wire import RELEASE
from wire.limits import WIRE

if TYPE_CHECKING:
    from wire.spans import Traces

logger = logging.getLogger("muster.traces")

TRACE_HEADERS = frozenset({"traceparent", "tracestate"})
"""W3C Trace Context. What a client sends of them goes on to the node, whether this process makes traces or not."""

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_HEADERS_FILE = "OTEL_EXPORTER_OTLP_HEADERS_FILE"
"""The one that OpenTelemetry has not: a file with what ``OTEL_EXPORTER_OTLP_HEADERS`` would hold, which may be a secret."""
_SAMPLERS = (
    "parentbased_always_on", "parentbased_always_off", "parentbased_traceidratio", "always_on", "always_off", "traceidratio",
)  # fmt: skip
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/pool/responses": "chat",
    "/v1/pool/continuations": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/images/generations": "generate_content",
}
_FINISH = re.compile(rb'"(?:finish_reason|stop_reason)"\s*:\s*"([a-z_]{1,32})"')


def name_operation(path: str) -> str:
    """Return ``gen_ai.operation.name`` of an API path; where the conventions have none, the path's last part."""
    return _OPERATIONS.get(path) or path.rpartition("/")[2]


def find_finish_reasons(answer: bytes) -> Sequence[str]:
    """Return why a model stopped, by the end of its answer; each reason once. What it said there is escaped, and not found."""
    return tuple(dict.fromkeys(found.decode("ascii") for found in _FINISH.findall(answer[-WIRE.stream_end_bytes :])))


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether the variables ask for traces."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    return exporter != "none" and (exporter != "" or any(environment.get(name, "").strip() for name in _ENDPOINTS))


class _Unusable(ValueError):
    """A variable holds something that cannot be used; the text says which and what would do."""


def _read_word(environment: Mapping[str, str], name: str, words: Sequence[str], hint: str = "") -> str:
    """Return a variable that is one of ``words``, of which the first holds when it is not set."""
    word = environment.get(name, "").strip().lower() or words[0]
    if word not in words:
        raise _Unusable(f"{name} must be {'one of ' if len(words) > 2 else ''}{', '.join(words)}{hint}, not {word!r}")
    return word


def _read_sampling(environment: Mapping[str, str]) -> tuple[str, float]:
    sampler = _read_word(environment, "OTEL_TRACES_SAMPLER", _SAMPLERS)
    given = environment.get("OTEL_TRACES_SAMPLER_ARG", "").strip()
    if not sampler.endswith("ratio") or not given:
        return sampler, 1.0
    try:
        ratio = float(given)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise _Unusable(f"OTEL_TRACES_SAMPLER_ARG must be a share from 0 to 1, such as 0.01, not {given!r}")
    return sampler, ratio


def _check_way(environment: Mapping[str, str]) -> None:
    _read_word(environment, "OTEL_TRACES_EXPORTER", ("otlp", "none"))
    for name in _PROTOCOLS:
        _read_word(environment, name, ("http/protobuf",), ", which collectors take on port 4318")
    for name in _ENDPOINTS:
        if (url := environment.get(name, "").strip()) and not url.startswith(("http://", "https://")):
            raise _Unusable(f"{name} must be a URL such as http://localhost:4318, not {url.rpartition('@')[2]!r}")


def _read_headers(environment: Mapping[str, str]) -> str:
    path = environment.get(_HEADERS_FILE, "").strip()
    try:
        return Path(path).read_text(encoding="utf-8").strip() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise _Unusable(f"{_HEADERS_FILE}: cannot read {path}: {error}") from None


def open_traces(environment: Mapping[str, str], *, service: str, instance: str) -> Traces | None:
    """Return the traces of this process; None: it makes none. ``environment`` is the process's own, which the SDK reads too.

    ``service`` and ``instance`` name the process where no variable does. A variable that cannot be used is said in the log and
    ends no process, since platforms set them for every program of a machine.
    """
    if not is_wanted(environment):
        return None
    try:
        _check_way(environment)
        sampler, ratio = _read_sampling(environment)
        headers = _read_headers(environment)
        from wire.spans import export_traces
    except _Unusable as fault:
        logger.warning("traces.off reason=%s", fault)
        return None
    except ImportError:
        words = "OTEL_ variables ask for traces, and the SDK is not installed: pip install 'muster[otel]'"
        logger.warning("traces.off reason=%s", words)
        return None
    named = {"service.name": service, "service.version": RELEASE, "service.instance.id": instance}
    logger.info("traces.on sampler=%s share=%g", sampler, ratio)
    return export_traces(sampler, ratio, named, headers)
