"""Walking a binary header with bounds: a hostile file costs neither memory nor hours. Little-endian throughout."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from runner.errors import CorruptModel
from runner.limits import limits


def corrupt(path: Path, problem: str) -> CorruptModel:
    """Return the error for a file that cannot be used."""
    return CorruptModel(f"{path.name} is damaged: {problem}. Copy or download it again.")


class HeaderCursor:
    """A position in a file of ``size`` bytes. Every method raises CorruptModel where the file ends or a bound is passed.

    ``chunk_bytes`` are read at a time: few where the header lies scattered between data that are passed over.
    """

    def __init__(self, path: Path, file: BinaryIO, size: int, *, chunk_bytes: int) -> None:
        self.path = path
        self.size = size
        self._file = file
        self._chunk_bytes = chunk_bytes
        self._chunk = b""
        self._at = 0
        self._chunk_start = 0
        self._walked = 0
        self._strings = 0

    @property
    def position(self) -> int:
        """Where the next byte is read from."""
        return self._chunk_start + self._at

    def fail(self, problem: str) -> CorruptModel:
        """Return the error to raise for this file."""
        return corrupt(self.path, problem)

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        if count > limits().models.take_bytes:
            raise self.fail(f"a field of its header says it is {count} bytes long")
        self._fill(count)
        start = self._at
        self._at += count
        return self._chunk[start : self._at]

    def skip(self, count: int) -> None:
        """Pass over ``count`` bytes, however many, without reading them."""
        if count <= len(self._chunk) - self._at:
            self._at += count
            return
        target = self.position + count
        if target > self.size:
            raise self.fail(f"it ends after {self.size} bytes, where at least {target} are needed")
        self._file.seek(target)
        self._chunk, self._at, self._chunk_start = b"", 0, target

    def unsigned(self, width: int) -> int:
        """Return an unsigned integer of ``width`` bytes."""
        return int.from_bytes(self.take(width), "little")

    def text(self, length: int) -> str:
        """Return ``length`` bytes as text; what is not UTF-8 is replaced."""
        return self.take(length).decode("utf-8", "replace")

    def skip_strings(self, count: int, *, width: int = 8) -> None:
        """Pass over ``count`` strings, each behind its length of ``width`` bytes."""
        self._strings += count
        if self._strings > limits().models.strings:
            raise self.fail(f"it claims to hold {self._strings} strings")
        left = count
        while left:
            if len(self._chunk) - self._at < width:
                self._fill(width)
            # Vocabularies have a million entries: local names, and no method call for those that are wholly in the chunk.
            chunk, at, end = self._chunk, self._at, len(self._chunk)
            while left and at + width <= end:
                following = at + width + int.from_bytes(chunk[at : at + width], "little")
                if following > end:
                    break
                at, left = following, left - 1
            self._at = at
            if left and at + width <= end:  # one that reaches beyond the chunk
                self.skip(self.unsigned(width))
                left -= 1

    def _fill(self, count: int) -> None:
        have = len(self._chunk) - self._at
        if have >= count:
            return
        start = self.position
        if start + count > self.size:
            raise self.fail(f"it ends after {self.size} bytes, in the middle of its header")
        more = self._file.read(max(self._chunk_bytes, count - have))
        self._walked += len(more)
        if self._walked > limits().models.walk_bytes:
            raise self.fail("its header does not end")
        self._chunk, self._at, self._chunk_start = self._chunk[self._at :] + more, 0, start
        if len(self._chunk) < count:
            raise self.fail("it was cut short while it was read")
