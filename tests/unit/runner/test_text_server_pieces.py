"""Tokens become whole characters, and stop strings end a text wherever the borders lie."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engines.children.textserver.pieces import Detokeniser, StopStrings
from tests.fakes.examples import examples


def bytes_as_tokens(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are single bytes."""
    return bytes(ids).decode("utf-8", "replace")


@examples(25)
@given(st.text(max_size=40))
def test_every_text_comes_back_and_no_piece_has_half_a_character(text: str) -> None:
    pieces = Detokeniser(bytes_as_tokens)
    parts = [pieces.add(byte) for byte in text.encode()]
    assert "".join(parts) + pieces.finish() == text.rstrip("\ufffd") or "\ufffd" in text
    assert "\ufffd" in text or not any("\ufffd" in part for part in parts)


def test_a_character_cut_off_at_the_end_is_left_out() -> None:
    pieces = Detokeniser(bytes_as_tokens)
    sent = "".join(pieces.add(byte) for byte in "good €".encode()[:-1])
    assert sent + pieces.finish() == "good "


def test_bytes_that_never_make_a_character_are_not_held_back_for_ever() -> None:
    pieces = Detokeniser(bytes_as_tokens)
    sent = "".join(pieces.add(0x80) for _ in range(64))
    assert "\ufffd" in sent


def run(stops: list[str], parts: list[str]) -> tuple[list[str], bool]:
    watch = StopStrings(stops)
    sent = [watch.add(part) for part in parts]
    return [*sent, watch.finish()], watch.hit


@pytest.mark.parametrize(
    ("parts", "text", "hit"),
    [
        (["one ", "STOP two"], "one ", True),
        (["one S", "T", "OP two"], "one ", True),
        (["one ST", "ART two"], "one START two", False),
        (["one STO"], "one STO", False),
        (["SSTOP"], "S", True),
        (["S", "S", "STOP", "more"], "SS", True),
        (["a", "b"], "ab", False),
    ],
)
def test_a_stop_string_ends_the_text_across_borders(parts: list[str], text: str, hit: bool) -> None:
    sent, was_hit = run(["STOP"], parts)
    assert ("".join(sent), was_hit) == (text, hit)


def test_nothing_of_a_possible_stop_string_is_sent_early() -> None:
    sent, _hit = run(["</end>"], ["text</", "en", "x"])
    assert sent == ["text", "", "</enx", ""]


def test_of_several_stop_strings_the_first_in_the_text_counts() -> None:
    sent, hit = run(["two", "one"], ["zero one two"])
    assert "".join(sent) == "zero "
    assert hit


@examples(25)
@given(st.text("ab", max_size=30), st.text("ab", min_size=1, max_size=4), st.integers(1, 5))
def test_pieces_make_no_difference_to_what_is_sent(text: str, stop: str, size: int) -> None:
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    sent, _hit = run([stop], parts)
    assert "".join(sent) == text.partition(stop)[0]
