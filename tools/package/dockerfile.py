"""A Dockerfile of ours as a list of stages: the instructions that our files use, and no others."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.package.compose import interpolate

_STEPS = {"RUN", "COPY", "ENV", "WORKDIR", "ARG", "USER"}
_QUIET = {"LABEL", "EXPOSE", "VOLUME"}


class DockerfileError(Exception):
    """The file has an instruction that is not understood here."""


@dataclass(slots=True)
class Stage:
    """``steps``: instruction and the rest of its line, in order; ``healthcheck``, ``command``: of what is started from it."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)


def read_stages(path: Path, arguments: Mapping[str, str]) -> list[Stage]:
    """Return the stages of a Dockerfile; ``arguments``: of the build. Raises DockerfileError and ComposeError."""
    stages: list[Stage] = []
    for line in _join_lines(path.read_text(encoding="utf-8")):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            base, *name = interpolate(rest, arguments).split()
            stages.append(Stage(base, name[-1] if name else ""))
        elif stages:
            _add(stages[-1], word, rest.strip(), arguments)
        elif word != "ARG":
            raise DockerfileError(f"{path.name}: {word} stands before FROM")
    return stages


def _add(stage: Stage, word: str, rest: str, arguments: Mapping[str, str]) -> None:
    if word in _STEPS:
        stage.steps.append((word, rest))
    elif word == "LABEL":
        stage.labels |= dict(pair.split("=", 1) for pair in shlex.split(interpolate(rest, arguments)))
    elif word == "ENTRYPOINT":
        stage.entrypoint = json.loads(rest)
    elif word == "CMD":
        stage.command = json.loads(rest)
    elif word == "HEALTHCHECK":
        stage.healthcheck = ["CMD", *json.loads(rest[rest.index("CMD ") + 4 :])]
    elif word not in _QUIET:
        raise DockerfileError(f"{word} is no instruction that is understood here")


def _join_lines(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [line.strip() for line in joined.splitlines()]
