"""What a person confirmed on this box: the fingerprint of the first policy, in words or in full, in a file of its own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from runner.operations.private_files import read_private, remove_private, write_private
from wire.optoken.approval import policy_words

TRUSTED_NAME = "trusted-policy"
FORGET_NAME = "forget-policy"
"""Its presence asks the box to forget what it pinned and witnessed."""
_WORD = "[bdfghjklmnprstvz][aiou][bdfghjklmnprstvz][aiou][bdfghjklmnprstvz]"
_WORDS = re.compile(rf"{_WORD}(-{_WORD}){{11}}")
_HEX = re.compile(r"[0-9a-f]{64}")


def parse_fingerprint(parts: Sequence[str]) -> str:
    """Return a fingerprint as it is written down, from words or digits as a person types them. Raises ValueError."""
    words = [word for part in parts for word in re.split(r"[\s-]+", part.strip().lower()) if word]
    if len(words) == 1 and _HEX.fullmatch(words[0]):
        return words[0]
    text = "-".join(words)
    if not _WORDS.fullmatch(text):
        raise ValueError("a fingerprint is twelve words of five letters, or 64 hexadecimal digits; type all of it")
    return text


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
