"""Synthesises something like a voice: harmonics of a wandering pitch in syllables, with pauses between phrases."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np

from tests.fakes.models.gguf_file import Floats

RATE = 16_000
PHRASES_S = ((0.6, 1.4), (5.0, 1.2), (9.4, 1.0))
"""Start and length of each phrase, in seconds."""
TOTAL_S = 12.0


def write_speech(path: Path) -> None:
    sound: Floats = np.zeros(int(TOTAL_S * RATE), np.float32)
    for start_s, length_s in PHRASES_S:
        at, count = int(start_s * RATE), int(length_s * RATE)
        sound[at : at + count] = _phrase(count)
    noise = np.random.default_rng(5).normal(0, 0.0005, sound.size)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(sound + noise, -1, 1) * 32767).astype("<i2").tobytes())


def _phrase(count: int) -> Floats:
    """Return vowels: a glottal pitch near 130 Hz, its harmonics shaped by two moving formants, four syllables a second."""
    seconds = np.arange(count) / RATE
    pitch = 130 + 18 * np.sin(2 * np.pi * 0.9 * seconds) + 6 * np.sin(2 * np.pi * 5.0 * seconds)
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    first = 550 + 200 * np.sin(2 * np.pi * 2.0 * seconds)
    second = 1500 + 500 * np.sin(2 * np.pi * 1.3 * seconds + 1.0)
    voice = np.zeros(count)
    for harmonic in range(1, 28):
        frequency = harmonic * pitch
        gain = sum(np.exp(-(((frequency - formant) / width) ** 2)) for formant, width in ((first, 130), (second, 220)))
        voice += (gain + 0.05) / harmonic**0.5 * np.sin(harmonic * phase)
    syllables = np.clip(np.sin(2 * np.pi * 4.0 * seconds) + 0.6, 0, 1)
    edges = np.minimum(1, np.minimum(seconds, seconds[::-1]) / 0.03)
    result: Floats = (0.35 * voice / np.abs(voice).max() * syllables * edges).astype(np.float32)
    return result
