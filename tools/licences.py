"""Licences of all locked packages: ``requirements/licences.csv``, written from what the packages say of themselves.

``./muster lock --licences`` writes it anew; a test holds it to the lock files and to what is installed. What is never installed
here, such as the packages for CUDA, is read from reports that pip writes without installing them, and kept from then on:
``pip install --dry-run --no-deps --ignore-installed --report REPORT -r requirements/vllm.txt``.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from controlplane.launcher.console import LauncherError
from controlplane.launcher.environment import SETS

FILE = Path("requirements", "licences.csv")
SHIPPED = frozenset({
    "0BSD", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "LGPL-3.0-only", "MIT", "MIT-0", "MPL-2.0",
    "PSF-2.0", "TCL", "Zlib", "ZPL-2.1",
})  # fmt: skip
"""What a package may have that comes with a server or a node. LGPL: psycopg, imported as it is. BSD: it says no more."""
FOR_DEVELOPERS = SHIPPED | {"GPL-3.0-only"}
"""Of a program that is only run, and comes with nothing of ours (hadolint)."""

FOR_CUDA = SHIPPED | {
    "BSL-1.0", "CNRI-Python", "ISC", "LGPL-2.1-only", "LicenseRef-NVIDIA-Proprietary", "LicenseRef-Proprietary", "MIT-CMU",
    "NOASSERTION", "Unlicense",
}  # fmt: skip
"""Of what an operator puts into an image of their own: NVIDIA's libraries are not free, and some packages tell nothing."""

_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Other/Proprietary License": "LicenseRef-Proprietary",
    "Python Software Foundation License": "PSF-2.0",
}
# What a package says in words of its own.
_WORDS = {
    "3-Clause BSD License": "BSD-3-Clause", "BSD 2-Clause License": "BSD-2-Clause", "GPL-3.0": "GPL-3.0-only",
    "BSD 3-Clause OR Apache-2.0": "BSD-3-Clause OR Apache-2.0", "Apache": "Apache-2.0", "Apache 2": "Apache-2.0",
    "Apache 2.0": "Apache-2.0", "Apache 2.0 License": "Apache-2.0", "Apache License": "Apache-2.0", "ISC License": "ISC",
    "MIT License": "MIT", "BSD-derived (http://www.repoze.org/LICENSE.txt)": "BSD",
    "NVIDIA SOFTWARE LICENSE": "LicenseRef-NVIDIA-Proprietary", "NVIDIA Proprietary Software": "LicenseRef-NVIDIA-Proprietary",
}  # fmt: skip
_READ = {
    # Nothing in the metadata: the licence file was read.
    "axe-playwright-python": "MIT",
    "promql-parser": "MIT",
    # Two classifiers do not say whether both hold; their licence files do.
    "python-dateutil": "Apache-2.0 AND BSD-3-Clause",
    "uvloop": "Apache-2.0 OR MIT",
    # Never installed on Linux with CPython 3.11: their own archives were read.
    "async-timeout": "Apache-2.0",
    "colorama": "BSD-3-Clause",
    "httpx2-jsfetch": "BSD-3-Clause",
    "py-ubjson": "Apache-2.0",
    "tzdata": "Apache-2.0",
    "u-msgpack-python": "MIT",
}
"""Licences that a person has read, where the metadata that is at hand does not tell."""
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==", re.MULTILINE)
_TOKEN = re.compile(r"[()]|[A-Za-z0-9.+-]+")
_CUDA = ("cuda", "vllm")


def list_locked(root: Path) -> dict[str, list[str]]:
    """Return every locked package, and the lock files that name it."""
    found: dict[str, list[str]] = {}
    for lock in (*SETS, "installer", *_CUDA):
        for name in dict.fromkeys(_PIN.findall((root / "requirements" / f"{lock}.txt").read_text(encoding="utf-8"))):
            found.setdefault(name, []).append(lock)
    return dict(sorted(found.items()))


def read_installed(name: str) -> str | None:
    """Return the SPDX expression of a package, None when it is not installed and nobody has read it."""
    if name in _READ:
        return _READ[name]
    try:
        told = distribution(name).metadata
    except PackageNotFoundError:
        return None
    said, text = ("".join(told.get_all(key) or ()) for key in ("License-Expression", "License"))
    return _choose(said, text, [str(each) for each in told.get_all("Classifier") or ()])


def read_report(path: Path) -> dict[str, str]:
    """Return the licences of what a report of pip's would install. Raises LauncherError."""
    try:
        told = [each["metadata"] for each in json.loads(path.read_text(encoding="utf-8"))["install"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise LauncherError(f"{path} is no report of pip install --report: {error}") from None
    return {
        re.sub(r"[-_.]+", "-", one["name"]).lower(): _choose(
            one.get("license_expression", ""), one.get("license", ""), one.get("classifier", [])
        )
        for one in told
    }


def _choose(expression: str, text: str, classifiers: Sequence[str]) -> str:
    """Return what a package says of itself: an expression, words that are known for one, or what its classifier means."""
    first = (text.strip().splitlines() or [""])[0]
    first = _WORDS.get(first, first)
    if expression or (_parse(first) and first not in {"BSD", "UNKNOWN"}):
        return expression or first
    named = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License")]
    known = [_CLASSIFIERS[each] for each in named if each in _CLASSIFIERS]
    return known[0] if len(known) == 1 else first or "NOASSERTION"


def print_table(root: Path, reports: Sequence[Path] = ()) -> str:
    """Return the file as it should be. Raises LauncherError for a report that cannot be read."""
    told = {name: licence for path in reports for name, licence in read_report(path).items()}
    kept = {name: licence for name, (licence, _) in read_table(root).items()}
    written = io.StringIO()
    rows = csv.writer(written, lineterminator="\n")
    rows.writerow(("package", "licence", "sets"))
    for name, sets in list_locked(root).items():
        licence = read_installed(name)
        rows.writerow((name, licence if licence is not None else told.get(name, kept.get(name, "")), " ".join(sets)))
    return written.getvalue()


def read_table(root: Path) -> dict[str, tuple[str, list[str]]]:
    """Return what the file says: of each package its licence and its sets."""
    with (root / FILE).open(encoding="utf-8", newline="") as file:
        return {row["package"]: (row["licence"], row["sets"].split()) for row in csv.DictReader(file)}


def find_refused(table: Mapping[str, tuple[str, list[str]]]) -> Iterator[str]:
    """Yield a line for each package whose licence is not on its list."""
    for name, (licence, sets) in table.items():
        allowed = SHIPPED
        if set(sets) <= {"dev", "installer"}:
            allowed = FOR_DEVELOPERS
        elif set(sets) <= {"dev", *_CUDA}:
            allowed = FOR_CUDA
        if not is_allowed(licence, allowed):
            told = licence or "not installed here: give a report of pip to ./muster lock --licences"
            yield f"{name} ({', '.join(sets)}): {told}"


def is_allowed(expression: str, allowed: frozenset[str]) -> bool:
    """Return whether a licence may be taken: all of ``AND``, one of ``OR``; an exception takes nothing away."""
    parsed = _parse(expression)
    return parsed is not None and parsed(allowed)


_Test = Callable[[frozenset[str]], bool]


def _parse(expression: str) -> _Test | None:
    """Return a test of an SPDX expression (``AND`` binds tighter than ``OR``); None for what is none."""
    if _TOKEN.sub("", expression).strip():
        return None
    tokens = _TOKEN.findall(expression)

    def take_choice() -> _Test:
        parts = [take_all()]
        while tokens[:1] == ["OR"]:
            tokens.pop(0)
            parts.append(take_all())
        return lambda allowed: any(part(allowed) for part in parts)

    def take_all() -> _Test:
        parts = [take_one()]
        while tokens[:1] == ["AND"]:
            tokens.pop(0)
            parts.append(take_one())
        return lambda allowed: all(part(allowed) for part in parts)

    def take_one() -> _Test:
        name = tokens.pop(0)
        if name == "(":
            inner = take_choice()
            if tokens.pop(0) != ")":
                raise IndexError
            return inner
        if tokens[:1] == ["WITH"]:
            del tokens[:2]
        return lambda allowed: name in allowed

    try:
        found = take_choice()
    except IndexError:
        return None
    return None if tokens else found
