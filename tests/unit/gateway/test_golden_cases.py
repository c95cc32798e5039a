"""What each dialect is told of a request and of its answer, to the byte: ``cases/*.json``."""

from __future__ import annotations

import json

import pytest

from tests.fakes.golden_cases import CASES, STREAMS, Player, write_event


@pytest.mark.parametrize("name", CASES)
def test_a_case_comes_out_to_the_byte(name: str) -> None:
    played = Player(CASES[name]).play()
    assert played == CASES[name]
    assert json.dumps(played) == json.dumps(CASES[name])  # 1 is not 1.0, and keys have an order


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_the_same_wherever_it_is_cut(name: str) -> None:
    entries = [entry for entry in STREAMS[name]["stream"] if entry[0] == "client"]
    expected = b"".join(write_event(entry, STREAMS[name]["client"], number) for number, entry in enumerate(entries))
    player = Player(STREAMS[name])
    for size in (1, 7, 1 << 20):
        assert player.stream(size) == expected, f"in pieces of {size} bytes"
