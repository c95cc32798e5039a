"""Prefixes: which replica has probably computed the beginning of a prompt already, as far as this gateway sent it there.

The bytes of a prompt are cut into blocks, and the hash of a block covers all before it: equal hashes mean equal beginnings.
Hashes begin with tenant and model, so no tenant ever meets another one's blocks, and Python's are keyed anew in each process,
so nobody finds two texts with one hash. Everything is a guess: an engine may have dropped what it computed.
"""

from __future__ import annotations

from collections.abc import Sequence

Blocks = Sequence[int]
"""Hashes of a prompt's blocks, each covering all before it."""


class PrefixIndex:
    """Blocks by the replicas that were sent them, the least recently used dropped beyond ``most``."""

    def __init__(self, *, block_bytes: int, most: int, per_prompt: int, replicas: int = 3) -> None:
        self._block_bytes, self._most, self._per_prompt, self._replicas = block_bytes, most, per_prompt, replicas
        self._holders: dict[int, tuple[int, ...]] = {}
        """Numbers of replicas by block, the newest first; the block used last comes last."""

    def __len__(self) -> int:
        return len(self._holders)

    def cut(self, tenant: str, model: str, prompt: bytes) -> Blocks:
        """Return the blocks of a prompt. A beginning shorter than a block counts as none: it saves nothing."""
        size = self._block_bytes
        covered = hash((tenant, model))
        blocks: list[int] = []
        for start in range(0, min(len(prompt) // size, self._per_prompt) * size, size):
            covered = hash((covered, prompt[start : start + size]))
            blocks.append(covered)
        return blocks

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
