"""Known advisories of locked packages: ``requirements/advisories.json``, the part of OSV that is about them.

``./muster lock --advisories`` takes it anew from OSV's export for PyPI, one archive with everything, or from an archive that is
named: a copy of that one, or of https://github.com/pypa/advisory-database. What somebody decided to live with stands in
``requirements/advisories-accepted.toml``, with a reason and a last day.
"""

from __future__ import annotations

import io
import json
import re
import tomllib
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any  # records are JSON or YAML of other people

from controlplane.launcher.console import LauncherError

SOURCE = "https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip"
FILE = Path("requirements", "advisories.json")
ACCEPTED = Path("requirements", "advisories-accepted.toml")
FRESH_DAYS = 60
"""An older snapshot knows too little to say that nothing is wrong."""
_LICENCE = "CC-BY-4.0, by the authors of the PyPI Advisory Database and of the GitHub Advisory Database"
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)
_SUMMARY_CHARS = 160


@dataclass(frozen=True, slots=True)
class Pin:
    """One locked package."""

    name: str
    version: str
    lock: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """An advisory that is lived with until the end of a day."""

    id: str
    package: str
    reason: str
    until: date


def list_pins(root: Path) -> list[Pin]:
    """Return what every lock file pins, those of engines with environments of their own included."""
    return [
        Pin(_normalise(name), version, path.stem)
        for path in sorted((root / "requirements").glob("*.txt"))
        for name, version in _PIN.findall(path.read_text(encoding="utf-8"))
    ]


def renew(root: Path, source: str) -> str:
    """Write the snapshot anew from an archive at a URL or path. Returns what to tell. Raises LauncherError."""
    wanted = {pin.name for pin in list_pins(root)}
    kept, newest, count = [], "", 0
    try:
        with zipfile.ZipFile(_open(source)) as archive:
            for entry in sorted(archive.namelist()):
                # A record stands in a folder of its package, or all in one; neither name tells, the record does.
                if entry.endswith((".json", ".yaml")):
                    record = _parse(entry, archive.read(entry))
                    count += 1
                    newest = max(newest, str(record.get("modified", "")))
                    kept += list(_select(record, wanted))
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise LauncherError(
            f"cannot read advisories from {source}: {error}. Name a copy: ./muster lock --advisories FILE.zip"
        ) from None
    if not newest:
        raise LauncherError(f"{source} holds no advisory")
    about = {
        "source": source if "://" in source else Path(source).name,
        "as_of": newest[:10],
        "licence": _LICENCE,
        "read": count,
    }
    # One a line, so that a change shows which.
    rows = ",\n".join(json.dumps(each, ensure_ascii=False, sort_keys=True) for each in kept)
    (root / FILE).write_text(f'{json.dumps(about)[:-1]}, "advisories": [\n{rows}\n]}}\n', encoding="utf-8")
    return f"{FILE}: {len(kept)} of {count} advisories are of {len(wanted)} locked packages, as of {newest[:10]}"


def _open(source: str) -> io.BytesIO | Path:
    if not source.startswith(("https://", "http://")):
        return Path(source)
    with urllib.request.urlopen(source, timeout=60) as answer:  # noqa: S310  # the scheme was looked at
        return io.BytesIO(answer.read())


def _parse(name: str, content: bytes) -> dict[str, Any]:
    if name.endswith(".json"):
        record = json.loads(content)
    else:
        import yaml

        try:
            record = yaml.load(content, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  # both are safe
        except yaml.YAMLError as error:
            raise ValueError(f"{name}: {error}") from None
    return record if isinstance(record, dict) else {}


def _select(record: Mapping[str, Any], wanted: set[str]) -> Iterator[dict[str, Any]]:
    """Yield what is kept of a record, for each wanted package that it is about."""
    if record.get("withdrawn"):
        return
    for affected in record.get("affected") or ():
        package = affected.get("package") or {}
        name = _normalise(str(package.get("name", "")))
        if package.get("ecosystem") != "PyPI" or name not in wanted:
            continue
        ranges = [each["events"] for each in affected.get("ranges") or () if each.get("type") == "ECOSYSTEM"]
        text = " ".join(str(record.get("summary") or record.get("details") or "").split())
        yield {
            "id": record["id"],
            "aliases": sorted(record.get("aliases") or ()),
            "package": name,
            "ranges": ranges,
            # Lists of versions repeat the ranges; they are kept where there is none.
            "versions": [] if ranges else [str(each) for each in affected.get("versions") or ()],
            "summary": text if len(text) <= _SUMMARY_CHARS else f"{text[:_SUMMARY_CHARS]}…",
        }


def read_snapshot(root: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((root / FILE).read_text(encoding="utf-8"))
    return told


def read_accepted(root: Path) -> list[Accepted]:
    """Return what was decided. Raises LauncherError when a row lacks its reason or its day."""
    rows = tomllib.loads((root / ACCEPTED).read_text(encoding="utf-8")).get("accepted", [])
    wrong = [row for row in rows if not (row.get("reason") and isinstance(row.get("until"), date))]
    if wrong:
        raise LauncherError(f"{ACCEPTED}: each row needs id, package, reason and until (a date): {wrong[0]}")
    return [Accepted(row["id"], _normalise(row["package"]), row["reason"], row["until"]) for row in rows]


def find_open(
    pins: Sequence[Pin], advisories: Sequence[Mapping[str, Any]], accepted: Sequence[Accepted], today: date
) -> list[str]:
    """Return a line for each advisory that a locked version is under and that nobody accepted for today."""
    lines = []
    for pin in dict.fromkeys(Pin(pin.name, pin.version, "") for pin in pins):
        locks = " ".join(each.lock for each in pins if (each.name, each.version) == (pin.name, pin.version))
        told: set[str] = set()
        for advisory in advisories:
            names = {str(advisory["id"]), *advisory["aliases"]}
            # One defect often has a record of PyPA's and one of GitHub's, each with the other's name.
            if advisory["package"] != pin.name or names & told or not is_affected(advisory, pin.version):
                continue
            told |= names
            decided = [each for each in accepted if each.package == pin.name and each.id in names]
            if any(today <= each.until for each in decided):
                continue
            late = f" (accepted until {decided[0].until})" if decided else ""
            lines.append(f"{pin.name} {pin.version} in {locks}: {' '.join(sorted(names))}{late}: {advisory['summary']}")
    return lines


def is_affected(advisory: Mapping[str, Any], version: str) -> bool:
    """Return whether a version is in a range of an advisory (OSV 1.6, "evaluation algorithm"), or in its list."""
    from packaging.version import InvalidVersion, Version

    def read(text: str) -> Version:
        try:
            return Version(text)
        except InvalidVersion:
            return Version("0")

    own = Version(version)
    for events in advisory["ranges"]:
        is_in = False
        for event in sorted(events, key=lambda each: read(next(iter(each.values())))):
            kind, text = next(iter(event.items()))
            if kind == "introduced" and own >= read(text):
                is_in = True
            elif (kind == "fixed" and own >= read(text)) or (kind == "last_affected" and own > read(text)):
                is_in = False
        if is_in:
            return True
    return any(own == read(text) for text in advisory["versions"])


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
