"""The VLLM_* variables of the model-runner specification, as fields of a definition. Pure: they come as a mapping."""

from __future__ import annotations

from collections.abc import Mapping

from runner.definitions.fields import BACKEND_FIELDS
from runner.definitions.kinds import Boolean, Integer, Kind
from runner.errors import ConfigError

VARIABLES: Mapping[str, str] = {
    "VLLM_MAX_MODEL_LEN": "vllm_max_model_len",
    "VLLM_GPU_MEMORY_UTILIZATION": "vllm_gpu_memory_utilization",
    "VLLM_ENABLE_PREFIX_CACHING": "vllm_enable_prefix_caching",
}
_WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def read_vllm_defaults(env: Mapping[str, str]) -> dict[str, object]:
    """Return the fields that the variables set, an empty one counting as unset. Raises ConfigError naming the variable."""
    found: dict[str, object] = {}
    for variable, name in VARIABLES.items():
        text = env.get(variable, "").strip()
        if not text:
            continue
        kind = BACKEND_FIELDS["vllm"][name].kind
        if isinstance(kind, Integer):
            kind = Integer(minimum=1, maximum=kind.maximum, unit=kind.unit)  # The step is that of the override form only.
        value = _parse(text, kind)
        if value is None or not kind.accepts(value):
            raise ConfigError(f"{variable} must be {kind.allowed()}, not {text[:40]!r}")
        found[name] = value
    return found


def _parse(text: str, kind: Kind) -> object:
    try:
        if isinstance(kind, Boolean):
            return _WORDS.get(text.lower())
        return int(text) if isinstance(kind, Integer) else float(text)
    except ValueError:
        return None
