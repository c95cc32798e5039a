"""Transcripts in the shapes that OpenAI's audio endpoints have: json, text, srt, vtt, verbose_json, and stream events. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

Segment = dict[str, Any]  # JSON
"""id, seek, start, end, text, tokens, temperature, avg_logprob, compression_ratio, no_speech_prob; perhaps words."""


@dataclass(slots=True)
class Outcome:
    """What is known of a transcription beside its segments. Times in milliseconds; ``language`` is a code."""

    task: str
    language: str = ""
    audio_ms: float = 0.0
    speech_ms: float = 0.0
    decode_ms: float = 0.0
    inference_ms: float = 0.0

    def timings(self) -> dict[str, float]:
        """Return the ``timings`` member: ``speech_ms`` is what the silence filter left of ``audio_ms``."""
        names = ("audio_ms", "speech_ms", "decode_ms", "inference_ms")
        return {name: round(getattr(self, name), 3) for name in names}

    def usage(self) -> dict[str, object]:
        """Return the ``usage`` member: whole seconds of audio, rounded up."""
        return {"type": "duration", "seconds": int(-(-self.audio_ms // 1000))}


def text_of(segments: Sequence[Segment]) -> str:
    """Return the whole transcript."""
    return "".join(segment["text"] for segment in segments).strip()


def as_json(segments: Sequence[Segment], outcome: Outcome) -> dict[str, object]:
    """Return the ``json`` shape."""
    return {"text": text_of(segments), "usage": outcome.usage(), "timings": outcome.timings()}


def as_verbose_json(segments: Sequence[Segment], outcome: Outcome, granularities: Collection[str]) -> dict[str, object]:
    """Return the ``verbose_json`` shape with segments, words or both."""
    found: dict[str, object] = {
        "task": outcome.task,
        "language": outcome.language,
        "duration": round(outcome.audio_ms / 1000, 3),
        **as_json(segments, outcome),
    }
    if "segment" in granularities:
        found["segments"] = [{name: value for name, value in segment.items() if name != "words"} for segment in segments]
    if "word" in granularities:
        found["words"] = [word for segment in segments for word in segment.get("words") or ()]
    return found


def as_srt(segments: Sequence[Segment]) -> str:
    """Return SubRip subtitles."""
    return "".join(
        f"{number}\n{_clock(segment['start'], ',')} --> {_clock(segment['end'], ',')}\n{segment['text'].strip()}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def as_vtt(segments: Sequence[Segment]) -> str:
    """Return WebVTT subtitles."""
    return "WEBVTT\n\n" + "".join(
        f"{_clock(segment['start'], '.')} --> {_clock(segment['end'], '.')}\n{segment['text'].strip()}\n\n"
        for segment in segments
    )


def delta_event(segment: Segment, *, first: bool) -> dict[str, object]:
    """Return the stream event of one segment."""
    return {"type": "transcript.text.delta", "delta": segment["text"].lstrip() if first else segment["text"]}


def done_event(segments: Sequence[Segment], outcome: Outcome) -> dict[str, object]:
    """Return the last stream event."""
    return {"type": "transcript.text.done", **as_json(segments, outcome)}


def _clock(seconds: float, mark: str) -> str:
    whole_ms = round(seconds * 1000)
    minutes, ms = divmod(whole_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{ms // 1000:02}{mark}{ms % 1000:03}"
