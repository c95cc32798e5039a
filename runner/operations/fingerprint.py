"""What a person confirmed on this box: the fingerprint of the first policy, in words or in full, in a file of its own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from runner.limits import limits
from runner.operations.private_files import read_private, remove_private, write_private
from wire.optoken.approval import policy_words

TRUSTED_NAME = "trusted-policy"
FORGET_NAME = "forget-policy"
"""Its presence asks the box to forget what it pinned and witnessed."""
_CONSONANTS, _VOWELS = "bdfghjklmnprstvz", "aiou"
_LETTERS = (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS, _CONSONANTS)
_WORD = re.compile("".join(f"[{letters}]" for letters in _LETTERS))
_HEX = re.compile(r"[0-9a-f]{64}")


def parse_fingerprint(parts: Sequence[str]) -> str:
    """Return a fingerprint as it is written down, from words or digits as a person types them.

    Raises ValueError that names the first word that cannot be one. It proposes no other: a guess is not what was confirmed.
    """
    words = [word for part in parts for word in re.split(r"[\s-]+", part.strip().lower()) if word]
    if len(words) == 1 and _HEX.fullmatch(words[0]):
        return words[0]
    for number, word in enumerate(words, start=1):
        if not _WORD.fullmatch(word) and len(words) > 1:
            shown = word[: limits().operations.word_chars]
            raise ValueError(f"word {number}, {shown!r}, cannot be one of a fingerprint: {_find_fault(word)}")
    if len(words) != 12 or not all(map(_WORD.fullmatch, words)):
        given = f"{len(words)} words were given" if len(words) != 1 else f"{len(words[0])} characters were given"
        raise ValueError(f"a fingerprint is twelve words of five letters, or 64 hexadecimal digits; {given}. Type all of it")
    return "-".join(words)


def _find_fault(word: str) -> str:
    """Return what is wrong with a word, such as ``its letter 3 is 'x'``."""
    if len(word) != len(_LETTERS):
        return f"it has {len(word)} letters, not {len(_LETTERS)}"
    number, letter = next((n, each) for n, each in enumerate(word) if each not in _LETTERS[n])
    return f"its letter {number + 1} is {letter!r}, which can be only one of {' '.join(_LETTERS[number])}"


def fingerprint_matches(fingerprint: str, document: bytes) -> bool:
    """Return whether a fingerprint is that of a policy document."""
    digest = hashlib.sha256(document).digest()
    return fingerprint in {digest.hex(), policy_words(digest.hex())}


def read_trusted(data: Path) -> str | None:
    """Return the fingerprint that was confirmed, None when none was or the file cannot be read as one."""
    try:
        content = read_private(data / TRUSTED_NAME)
        return None if content is None else parse_fingerprint([content.decode("ascii")])
    except (OSError, ValueError):
        return None


def write_trusted(data: Path, fingerprint: str) -> None:
    """Write down what was confirmed. Raises OSError."""
    write_private(data / TRUSTED_NAME, f"{fingerprint}\n".encode())


def use_up_trusted(data: Path) -> None:
    """Withdraw what was confirmed once it has served: a box that loses its ledger must not pin an old policy by it again.

    Raises OSError.
    """
    remove_private(data / TRUSTED_NAME)


def ask_to_forget(data: Path) -> None:
    """Leave word for the box to forget, and withdraw what was confirmed. Raises OSError."""
    remove_private(data / TRUSTED_NAME)  # first, so that a box that has forgotten finds nothing to trust again
    write_private(data / FORGET_NAME, b"")


def is_asked_to_forget(data: Path) -> bool:
    """Return whether the box has been asked and has not done it yet."""
    return (data / FORGET_NAME).exists()


def forget_is_done(data: Path) -> None:
    """Take the word back. Raises OSError."""
    remove_private(data / FORGET_NAME)
