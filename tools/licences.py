"""Licences of all locked packages: ``requirements/licences.csv``, written from what the packages say of themselves.

``./muster lock --licences`` writes it anew; a test holds it to the lock files and to what is installed.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from controlplane.launcher.environment import SETS

FILE = Path("requirements", "licences.csv")
SHIPPED = frozenset({
    "0BSD", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "LGPL-3.0-only", "MIT", "MIT-0", "MPL-2.0",
    "PSF-2.0", "TCL", "Zlib", "ZPL-2.1",
})  # fmt: skip
"""What a package may have that comes with a server or a node. LGPL: psycopg, imported as it is. BSD: it says no more."""
FOR_DEVELOPERS = SHIPPED | {"GPL-3.0-only"}
"""Of a program that is only run, and comes with nothing of ours (hadolint)."""

_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
# What a package says in words of its own.
_WORDS = {
    "3-Clause BSD License": "BSD-3-Clause", "BSD 2-Clause License": "BSD-2-Clause", "GPL-3.0": "GPL-3.0-only",
    "BSD 3-Clause OR Apache-2.0": "BSD-3-Clause OR Apache-2.0", "Apache": "Apache-2.0", "Apache 2": "Apache-2.0",
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
_ID = re.compile(r"^[A-Za-z0-9.+-]+(?: (?:AND|OR) [A-Za-z0-9.+-]+)*$")


def list_locked(root: Path) -> dict[str, list[str]]:
    """Return every locked package, and the lock files that name it."""
    found: dict[str, list[str]] = {}
    for lock in (*SETS, "installer"):
        for name in dict.fromkeys(_PIN.findall((root / "requirements" / f"{lock}.txt").read_text(encoding="utf-8"))):
            found.setdefault(name, []).append(lock)
    return dict(sorted(found.items()))


def read_licence(name: str) -> str:
    """Return the SPDX expression of a package; empty when it is not installed and nobody has read it."""
    if name in _READ:
        return _READ[name]
    try:
        told = distribution(name).metadata
    except PackageNotFoundError:
        return ""
    said, text = ("".join(told.get_all(key) or ()) for key in ("License-Expression", "License"))
    first = (text.strip().splitlines() or [""])[0]
    first = _WORDS.get(first, first)
    if said or (_ID.match(first) and first not in {"BSD", "UNKNOWN"}):
        return said or first
    named = [str(each).rpartition(" :: ")[2] for each in told.get_all("Classifier") or () if str(each).startswith("License")]
    known = [_CLASSIFIERS[each] for each in named if each in _CLASSIFIERS]
    return known[0] if len(known) == 1 else first


def print_table(root: Path) -> str:
    """Return the file as it should be."""
    written = io.StringIO()
    rows = csv.writer(written, lineterminator="\n")
    rows.writerow(("package", "licence", "sets"))
    rows.writerows((name, read_licence(name), " ".join(sets)) for name, sets in list_locked(root).items())
    return written.getvalue()


def read_table(root: Path) -> dict[str, tuple[str, list[str]]]:
    """Return what the file says: of each package its licence and its sets."""
    with (root / FILE).open(encoding="utf-8", newline="") as file:
        return {row["package"]: (row["licence"], row["sets"].split()) for row in csv.DictReader(file)}


def find_refused(table: Mapping[str, tuple[str, list[str]]]) -> Iterator[str]:
    """Yield a line for each package whose licence is not on its list."""
    for name, (licence, sets) in table.items():
        allowed = FOR_DEVELOPERS if set(sets) <= {"dev", "installer"} else SHIPPED
        if not is_allowed(licence, allowed):
            yield f"{name} ({', '.join(sets)}): {licence or 'no licence told'}"


def is_allowed(expression: str, allowed: frozenset[str]) -> bool:
    """Return whether a licence may be taken: of ``AND`` all have to be allowed, of ``OR`` one."""
    return bool(_ID.match(expression)) and all(
        any(one in allowed for one in part.split(" OR ")) for part in expression.split(" AND ")
    )
