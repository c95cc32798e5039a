"""The shapes of transcripts."""

from __future__ import annotations

from runner.engines.children.whisper_answer import (
    Outcome,
    Segment,
    as_json,
    as_srt,
    as_verbose_json,
    as_vtt,
    delta_event,
    text_of,
)


def segment(text: str, start: float, end: float) -> Segment:
    words = [{"word": word, "start": start, "end": end} for word in text.split()]
    return {"id": 0, "start": start, "end": end, "text": text, "words": words}


SEGMENTS = [segment(" One two.", 0.0, 1.5), segment(" Three.", 3599.9996, 3723.25)]
OUTCOME = Outcome("transcribe", "en", audio_ms=3_723_250, speech_ms=3000, inference_ms=12.3456)


def test_subtitles_count_hours_and_round_to_milliseconds() -> None:
    assert as_srt(SEGMENTS) == ("1\n00:00:00,000 --> 00:00:01,500\nOne two.\n\n2\n01:00:00,000 --> 01:02:03,250\nThree.\n\n")
    assert as_vtt(SEGMENTS).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne two.\n\n")


def test_usage_is_in_whole_seconds_rounded_up() -> None:
    assert as_json(SEGMENTS, OUTCOME)["usage"] == {"type": "duration", "seconds": 3724}


def test_words_and_segments_come_as_asked() -> None:
    both = as_verbose_json(SEGMENTS, OUTCOME, {"word", "segment"})
    assert [word["word"] for word in both["words"]] == ["One", "two.", "Three."]  # type: ignore[attr-defined]  # JSON
    assert all("words" not in found for found in both["segments"])  # type: ignore[attr-defined]  # JSON
    assert "words" not in as_verbose_json(SEGMENTS, OUTCOME, {"segment"})
    assert "segments" not in as_verbose_json(SEGMENTS, OUTCOME, {"word"})


def test_the_pieces_of_a_stream_make_the_whole_text() -> None:
    deltas = [str(delta_event(found, first=number == 0)["delta"]) for number, found in enumerate(SEGMENTS)]
    assert "".join(deltas) == text_of(SEGMENTS) == "One two. Three."
