"""The bill of materials of what we ship: a lock file, said in CycloneDX 1.6 (ECMA-424). Standard library only.

``python requirements/sbom.py server`` prints it; so for runner, engines, dev and installer, and for a file of such pins, as an
image has one. It is made when it is asked for, so that it cannot differ from what is installed.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_FOLDER = Path(__file__).resolve().parent
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)(?: ; ([^\\]+?))?\s*(?:\\|$)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})\b")


_RELEASE = re.compile(r'^RELEASE = "([^"]+)"', re.MULTILINE)
_CHART = {
    "type": "library", "bom-ref": "pkg:npm/uplot@1.6.32", "name": "uplot", "version": "1.6.32", "purl": "pkg:npm/uplot@1.6.32",
    "licenses": [{"license": {"id": "MIT"}}],
}  # fmt: skip
"""What the server's pages carry of somebody else."""


def read_licences(folder: Path) -> dict[str, str]:
    """Return the licence of each package, where the list of them is at hand."""
    path = folder / "licences.csv"
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {row["package"]: row["licence"] for row in csv.DictReader(file)}


def _state_licence(expression: str) -> dict[str, object]:
    # "BSD" without a number is a name, and no identifier of SPDX.
    return {"license": {"name": expression}} if expression in {"BSD", "NOASSERTION"} else {"expression": expression}


def read_lock(text: str, licences: Mapping[str, str] = MappingProxyType({})) -> list[dict[str, object]]:
    """Return the components of a lock file, in its order. Each has a hash for every archive that may be installed of it."""
    components: list[dict[str, object]] = []
    hashes: list[dict[str, str]] = []
    for line in text.splitlines():
        if pin := _PIN.match(line):
            name, version, marker = pin.groups()
            hashes = []
            url = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{version}"
            components.append(
                {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url, "hashes": hashes}
                | ({"licenses": [_state_licence(licences[name])]} if name in licences else {})
                | ({"properties": [{"name": "muster:marker", "value": marker}]} if marker else {})
            )
        hashes += [{"alg": "SHA-256", "content": found} for found in _HASH.findall(line)]
    return components


def make_bill(name: str) -> str:
    """Return the bill of a lock file as text. It holds no time and no random number: equal locks have equal bills."""
    path = Path(name) if name.endswith(".txt") else _FOLDER / f"{name}.txt"
    components = read_lock(path.read_text(encoding="utf-8"), read_licences(_FOLDER))
    if any(one["name"] == "django" for one in components):
        components.append(_CHART)
    own = {"type": "application", "bom-ref": "muster", "name": "muster", "licenses": [{"license": {"id": "Apache-2.0"}}]}
    about = _FOLDER.parent / "wire" / "__init__.py"
    if about.exists() and (found := _RELEASE.search(about.read_text(encoding="utf-8"))):
        own |= {"version": found[1], "purl": f"pkg:pypi/muster@{found[1]}"}
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
    }
    return json.dumps(bill, indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(make_bill(sys.argv[1]))
