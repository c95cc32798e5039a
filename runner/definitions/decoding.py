"""How tokens are chosen: the decoding fields of the llm-pool specification, their limits and the values without any setting."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from runner.definitions.kinds import Integer, Kind, Number, Text, TextList


class Decoding(msgspec.Struct, frozen=True, kw_only=True):
    """Decoding values. ``max_tokens`` is the most tokens that are generated; ``stop`` are further stop strings."""

    beam_size: int = 1
    top_k: int = 1
    top_p: float = 1.0
    temperature: float = 0.1
    repetition_penalty: float = 1.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()


DECODING_FIELDS: Mapping[str, Kind] = {
    "beam_size": Integer(minimum=1, maximum=16, unit="beams"),
    "top_k": Integer(minimum=1, maximum=200, unit="tokens"),
    "top_p": Number(minimum=0.0, maximum=1.0),
    "temperature": Number(minimum=0.0, maximum=2.0),
    "repetition_penalty": Number(minimum=0.0, is_above_minimum=True),
    "max_tokens": Integer(minimum=1, maximum=4096, unit="tokens"),
    "stop": TextList(item=Text(what="a string that is not empty", has_any_characters=True), maximum=16),
}


def merge_decoding(defaults: Decoding, given: Mapping[str, object]) -> Decoding:
    """Return the defaults with checked values over them."""
    values: dict[str, object] = {**msgspec.structs.asdict(defaults), **given}
    return msgspec.convert(values, Decoding)
