"""What a model id, a repository id and a revision may look like. Pure: an id that passes can be joined to a folder."""

from __future__ import annotations

import re

from runner.errors import InvalidRequest
from runner.limits import limits

SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=:-]*", re.ASCII)
_REPO_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}", re.ASCII)
WHISPER_SIZES = {
    "tiny": "Systran/faster-whisper-tiny",
    "base": "Systran/faster-whisper-base",
    "small": "Systran/faster-whisper-small",
    "medium": "Systran/faster-whisper-medium",
    "large": "Systran/faster-whisper-large-v3",
    "large-v3": "Systran/faster-whisper-large-v3",
}
"""Whisper models by their size, as the model-runner specification names them, and where faster-whisper has them from."""
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)


def is_model_id(text: str) -> bool:
    """Return whether it is ``name``, ``org/name`` or a longer relative path of plain segments, at most 200 characters."""
    if not 1 <= len(text) <= limits().models.id_chars or ".." in text:
        return False
    return all(SEGMENT.fullmatch(segment) for segment in text.split("/"))


def check_model_id(text: str) -> tuple[str, ...]:
    """Return the segments of a model id. Raises InvalidRequest."""
    if not is_model_id(text):
        raise InvalidRequest(
            "A model id is org/name, or a path below the model folder: letters, digits and _ . + @ = : - in parts "
            f"separated by single slashes, no '..', at most {limits().models.id_chars} characters.",
            param="modelId",
        )
    return tuple(text.split("/"))


def split_repo_id(segments: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the repository of a model id and the path inside it ("" = all of it), None when it cannot be one."""
    if len(segments) < 2 or not all(_REPO_SEGMENT.fullmatch(segment) and "--" not in segment for segment in segments[:2]):
        return None
    return "/".join(segments[:2]), "/".join(segments[2:])


def check_revision(text: str) -> str:
    """Return a revision: a branch, a tag or a commit. Raises InvalidRequest."""
    if len(text) > limits().models.id_chars or ".." in text or not _REVISION.fullmatch(text):
        raise InvalidRequest("A revision is a branch, a tag or a commit of the repository.", param="revision")
    return text
