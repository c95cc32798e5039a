"""Prefixes: which replica has probably computed the beginning of a prompt already, as far as this gateway sent it there.

The bytes of a prompt are cut into blocks, and the hash of a block covers all before it: equal hashes mean equal beginnings.
Hashes begin with tenant and model, so no tenant ever meets another one's blocks, and Python's are keyed anew in each process,
so nobody finds two texts with one hash. Everything is a guess: an engine may have dropped what it computed.
"""

from __future__ import annotations

from collections.abc import Sequence

Blocks = Sequence[int]
"""Hashes of the blocks of a prompt, each covering all before it."""


class PrefixIndex:
    """Blocks by the replicas that were sent them, the least recently used dropped beyond ``most``."""

    def __init__(self, *, block_bytes: int, most: int, per_prompt: int, even: int = 16, replicas: int = 3) -> None:
        self._most, self._replicas = most, replicas
        self._ends = _list_ends(block_bytes, per_prompt, even)
        """Where the blocks of a prompt end, in bytes."""
        self.most_bytes = self._ends[-1]
        """So much of a prompt is looked at."""
        self._holders: dict[int, tuple[int, ...]] = {}
        """Numbers of replicas by block, the newest first; the block used last comes last."""

    def __len__(self) -> int:
        return len(self._holders)

    def cut(self, tenant: str, model: str, prompt: bytes) -> Blocks:
        """Return the blocks of a prompt. A beginning shorter than a block counts as none: it saves nothing."""
        covered = hash((tenant, model))
        blocks: list[int] = []
        start, size = 0, len(prompt)
        for end in self._ends:
            if end > size:
                break
            covered = hash((covered, prompt[start:end]))
            blocks.append(covered)
            start = end
        return blocks

    def measure(self, count: int, blocks: Blocks) -> float:
        """Return which share of what was cut the first ``count`` blocks are, in bytes."""
        return self._ends[count - 1] / self._ends[len(blocks) - 1]

    def count_held(self, blocks: Blocks) -> dict[int, int]:
        """Return how many blocks from the beginning each replica holds, by its number; those that hold none are left out."""
        held: dict[int, int] = {}
        holders = self._holders
        for count, block in enumerate(blocks):
            found = False
            for replica in holders.get(block, ()):
                if held.get(replica, 0) == count:  # else it lacks a block before, and has computed this one with another text
                    held[replica] = count + 1
                    found = True
            if not found:
                break
        return held

    def note(self, blocks: Blocks, replica: int) -> None:
        """Take that a replica is sent a prompt: it holds all of its blocks from now on."""
        holders = self._holders
        for block in blocks:
            known = holders.pop(block, ())
            if not known or known[0] != replica:
                known = (replica, *(other for other in known if other != replica))[: self._replicas]
            holders[block] = known
        while len(holders) > self._most:
            del holders[next(iter(holders))]


def _list_ends(block_bytes: int, count: int, even: int) -> list[int]:
    # The first ones are of one size; each later one is a quarter of all before it, or long prompts would cost too much.
    ends: list[int] = []
    end = 0
    for number in range(count):
        end += block_bytes if number < even else max(block_bytes, end // 4 // block_bytes * block_bytes)
        ends.append(end)
    return ends
