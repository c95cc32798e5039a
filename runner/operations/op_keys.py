"""The HMAC keys that this box makes for the tokens of its own operations: made here, handed over, renewed, dropped."""

from __future__ import annotations

import re
import secrets
from itertools import pairwise
from pathlib import Path

from runner.limits import limits
from runner.operations.keys import KEY_SUFFIX, read_key
from runner.operations.private_files import sync_folder, write_private

FOLDER_NAME = "op-keys"
_KID = re.compile(r"(\d{10})-[0-9a-f]{4}")


class TooManyKeys(Exception):
    """As many keys are valid as may be; the oldest are dropped a day after they were replaced."""


class OpKeys:
    """The keys in ``folder``, one file ``<kid>.key`` each. A kid begins with the Unix second in which its key was made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list_kids(self) -> list[str]:
        """Return the ids of the keys, the newest last. Raises OSError."""
        if not self.folder.is_dir():
            return []
        return sorted(path.stem for path in self.folder.glob(f"*{KEY_SUFFIX}") if _KID.fullmatch(path.stem))

    def read(self) -> dict[str, bytes]:
        """Return the keys by id, the newest last. Raises OSError and UnusableKey."""
        return {kid: read_key(self._path(kid)) for kid in self.list_kids()}

    def ensure(self, now: float) -> None:
        """Make the first key. Raises OSError."""
        if not self.list_kids():
            self._make(int(now))

    def renew(self, now: float) -> str:
        """Make another key and return its id; those before it are good for a day more. Raises TooManyKeys and OSError."""
        self.drop_retired(now)
        kids = self.list_kids()
        if len(kids) >= limits().operations.op_keys:
            raise TooManyKeys(f"{len(kids)} keys are valid, the most there may be; the oldest is dropped within a day")
        # Above the newest even when the clock was set back, since the order of the ids is that of their age.
        return self._make(max(int(now), _made_at(kids[-1]) + 1 if kids else 0))

    def drop_retired(self, now: float) -> list[str]:
        """Remove every key whose successor was made a day ago; return their ids. Raises OSError."""
        kids = self.list_kids()
        retired = [
            kid for kid, successor in pairwise(kids) if _made_at(successor) + limits().operations.op_key_overlap_s <= now
        ]
        for kid in retired:
            self._path(kid).unlink(missing_ok=True)
        if retired:
            sync_folder(self.folder)
        return retired

    def _make(self, made_at: int) -> str:
        kid = f"{made_at:010d}-{secrets.token_hex(2)}"
        # Text, because readers of key files take one newline off the end.
        write_private(self._path(kid), secrets.token_hex(32).encode())
        return kid

    def _path(self, kid: str) -> Path:
        return self.folder / f"{kid}{KEY_SUFFIX}"


def _made_at(kid: str) -> int:
    return int(kid.partition("-")[0])
