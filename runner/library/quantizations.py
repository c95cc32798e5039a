"""Which of the models found are the same one in another quantisation, by the way publishers name them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from runner.library.files import FoundModel

_PART = re.compile(r"-\d{5}-of-\d{5}$")
_SUFFIX = re.compile(
    r"[-_.](?:i?q\d+(?:_[a-z0-9]{1,3}){0,3}|bf16|fp?16|fp?32|fp8(?:[-_]dynamic)?|(?:mx|nv)fp4|tq\d_\d|awq|gptq|exl[23]|gguf|ct2"
    r"|(?:int)?[2-8][-_]?bit|int[48](?:_[a-z0-9]+)?|w\da\d+|\d(?:\.\d+)?bpw|ud|imat|imatrix|quantized)$",
    re.IGNORECASE | re.ASCII,
)


def name_without_quantization(model_id: str) -> str:
    """Return the last part of an id in lower case, without what says how the weights are stored."""
    name = _PART.sub("", model_id.rsplit("/", 1)[-1])
    while (shorter := _SUFFIX.sub("", name)) != name and shorter:
        name = shorter
    return name.lower()


def other_quantizations(model_id: str, found: Iterable[FoundModel]) -> tuple[FoundModel, ...]:
    """Return the usable models of the same name whose quantisation is known, the largest first; the model itself is not one."""
    name = name_without_quantization(model_id)
    same = [
        entry
        for entry in found
        if entry.model_id != model_id
        and entry.problem is None
        and entry.quantization is not None
        and name_without_quantization(entry.model_id) == name
    ]
    return tuple(sorted(same, key=lambda entry: (-entry.size_bytes, entry.model_id)))
