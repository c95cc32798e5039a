"""A Compose file as Docker reads it: variables filled in, checked against the published schema, what it names found.

``compose-spec.json`` is that schema, of compose-spec/compose-spec at 170098ba (Apache-2.0).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jsonschema_rs
import yaml

SCHEMA = Path(__file__).with_name("compose-spec.json")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Service = dict[str, Any]  # Any: the file's own shape, which the schema describes


class ComposeError(Exception):
    """The file, or a variable of it, cannot be used; the text says why."""


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with its ``${NAME…}`` filled in as Compose does it, one inside the other too. Raises ComposeError."""
    filled, rest = _interpolate(text, variables, is_inner=False)
    assert not rest
    return filled


def _interpolate(text: str, variables: Mapping[str, str], *, is_inner: bool) -> tuple[str, str]:
    parts: list[str] = []
    while text:
        if is_inner and text[0] == "}":
            return "".join(parts), text[1:]
        if text.startswith("$$"):
            parts.append("$")
            text = text[2:]
        elif text.startswith("${"):
            value, text = _fill_one(text[2:], variables)
            parts.append(value)
        elif text[0] == "$" and (found := _NAME.match(text, 1)):
            parts.append(variables.get(found[0], ""))
            text = text[found.end() :]
        else:
            parts.append(text[0])
            text = text[1:]
    if is_inner:
        raise ComposeError("a ${ has no end")
    return "".join(parts), ""


def _fill_one(text: str, variables: Mapping[str, str]) -> tuple[str, str]:
    found = _NAME.match(text)
    if found is None:
        raise ComposeError(f"${{{text[:20]} names no variable")
    value, text = variables.get(found[0]), text[found.end() :]
    operator = next((each for each in (":-", ":?", ":+", "-", "?", "+", "") if text.startswith(each)), "")
    word, rest = _interpolate(text[len(operator) :], variables, is_inner=True)
    is_set = bool(value) if operator.startswith(":") else value is not None
    match operator[-1:]:
        case "-":
            return (value or "") if is_set else word, rest
        case "+":
            return word if is_set else "", rest
        case "?" if not is_set:
            raise ComposeError(f"{found[0]} is not set: {word}")
    return value or "", rest


def read_compose(path: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return a file with its variables filled in. Raises ComposeError."""

    def fill(value: Any) -> Any:  # Any: YAML
        match value:
            case str():
                return interpolate(value, variables)
            case list():
                return [fill(each) for each in value]
            case dict():
                return {name: fill(each) for name, each in value.items()}
        return value

    return cast("dict[str, Any]", fill(yaml.safe_load(path.read_text(encoding="utf-8"))))


def find_faults(compose: dict[str, Any], folder: Path) -> Iterator[str]:
    """Yield what the schema refuses, and what is named and not there. ``folder``: that of the file."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    for error in jsonschema_rs.validator_for(schema).iter_errors(compose):
        yield f"{'.'.join(map(str, error.instance_path))}: {error.message[:200]}"
    for name, service in compose["services"].items():
        for other in service.get("depends_on", {}):
            if other not in compose["services"]:
                yield f"{name} depends on {other}, which is none"
        for kind in ("secrets", "configs"):
            for one in service.get(kind, []):
                source = one if isinstance(one, str) else one["source"]
                if source not in compose.get(kind, {}):
                    yield f"{name} names {kind[:-1]} {source}, which is none"
        yield from (f"{name} mounts {text}" for text in _find_lost_mounts(service, compose, folder))
        if "build" in service and not (folder / service["build"]["context"] / service["build"]["dockerfile"]).is_file():
            yield f"{name} is built from {service['build']['dockerfile']}, which is not there"


def _find_lost_mounts(service: Service, compose: dict[str, Any], folder: Path) -> Iterator[str]:
    for source, _, _ in list_mounts(service):
        if source.startswith(("./", "../")):
            if not (folder / source).exists():
                yield f"{source}, which is not there"
        elif not source.startswith("/") and source not in compose["volumes"]:
            yield f"volume {source}, which is none"


def list_mounts(service: Service) -> list[tuple[str, str, bool]]:
    """Return source, target and whether it is read-only of each mount."""
    mounts = []
    for text in service.get("volumes", []):
        source, target, *mode = text.split(":")
        mounts.append((source, target, mode == ["ro"]))
    return mounts


def list_started(compose: dict[str, Any], profiles: set[str]) -> list[str]:
    """Return the services of these profiles and of none, each after those that it depends on."""
    services: dict[str, Service] = compose["services"]
    wanted = {name for name, service in services.items() if not service.get("profiles") or profiles & set(service["profiles"])}
    order: list[str] = []

    def add(name: str) -> None:
        if name in wanted and name not in order:
            for other in services[name].get("depends_on", {}):
                add(other)
            order.append(name)

    for name in services:
        add(name)
    return order
