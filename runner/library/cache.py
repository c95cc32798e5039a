"""Cache folder of huggingface_hub: where a repository, its commits and its files lie. Other programs share it.

Layout as in that library: ``models--org--name/{refs/<revision>, blobs/<digest>, snapshots/<commit>/<file> -> blob}``.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runner.library.files import COMMIT, is_model_id
from runner.limits import limits

_PREFIX = "models--"


@dataclass(frozen=True, slots=True)
class RepoCache:
    """One repository in the cache ``root``; nothing of it needs to exist."""

    root: Path
    repo_id: str

    @property
    def folder(self) -> Path:
        return self.root / (_PREFIX + self.repo_id.replace("/", "--"))

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def commit_of(self, revision: str | None) -> str | None:
        """Return the commit that was fetched for a revision; without one, that of main, else the newest there is."""
        commit = revision if revision is not None and COMMIT.fullmatch(revision) else self._read_ref(revision or "main")
        if commit is not None and self.snapshot(commit).is_dir():
            return commit
        return self._newest() if revision is None else None

    def _read_ref(self, revision: str) -> str | None:
        path = self.folder / "refs" / revision
        # Other programs write here too: a ref that is a link, or is longer than a commit, is not followed or read.
        try:
            if path.is_symlink() or path.stat().st_size > 100:
                return None
            text = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return text if COMMIT.fullmatch(text) else None

    def _newest(self) -> str | None:
        try:
            found = [entry for entry in (self.folder / "snapshots").iterdir() if COMMIT.fullmatch(entry.name)]
            dated = [(entry.stat().st_mtime_ns, entry.name) for entry in found if entry.is_dir() and not entry.is_symlink()]
        except OSError:
            return None
        return max(dated)[1] if dated else None

    def place(self, commit: str, name: str, digest: str) -> None:
        """Make a blob appear as a file of a commit, in one step. Raises OSError."""
        pointer, blob = self.snapshot(commit) / name, self.blob(digest)
        fresh = _make_fresh(pointer)
        try:
            fresh.symlink_to(os.path.relpath(blob, pointer.parent))
        except OSError:  # a file system without links: the file itself lies there
            fresh = blob
        fresh.replace(pointer)

    def write_ref(self, revision: str, commit: str) -> None:
        """Note which commit a branch or tag was when it was fetched. Raises OSError."""
        if not COMMIT.fullmatch(revision):
            path = self.folder / "refs" / revision
            fresh = _make_fresh(path)
            fresh.write_text(commit, encoding="ascii")
            fresh.replace(path)


def _make_fresh(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A file appears whole or not at all: it is written under another name beside its own.
    return path.with_name(f".{path.name[:80]}.{uuid.uuid4().hex[:8]}")


def cached_repos(root: Path) -> Iterator[RepoCache]:
    """Yield the repositories in a cache, sorted, as far as their names make model ids."""
    try:
        names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in [name for name in names if name.startswith(_PREFIX)][: limits().models.cached_repos]:
        organisation, _, repository = name.removeprefix(_PREFIX).partition("--")
        repo_id = f"{organisation}/{repository}"
        if repository and is_model_id(repo_id):
            yield RepoCache(root, repo_id)
