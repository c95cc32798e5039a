"""The bill of materials of what we ship: a lock file, said in CycloneDX 1.6 (ECMA-424). Standard library only.

``python requirements/sbom.py server`` prints it; so for runner, engines, dev and installer. It is made when it is asked for, so
that it cannot differ from what is installed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
_PIN = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)(?: ; ([^\\]+?))?\s*(?:\\|$)")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})\b")


def read_lock(text: str) -> list[dict[str, object]]:
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
                | ({"properties": [{"name": "muster:marker", "value": marker}]} if marker else {})
            )
        hashes += [{"alg": "SHA-256", "content": found} for found in _HASH.findall(line)]
    return components


def make_bill(name: str) -> str:
    """Return the bill of a lock file as text. It holds no time and no random number: equal locks have equal bills."""
    components = read_lock((_FOLDER / f"{name}.txt").read_text(encoding="utf-8"))
    about = {"component": {"type": "application", "bom-ref": f"muster-{name}", "name": f"muster-{name}"}}
    bill = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "metadata": about, "components": components}
    return json.dumps(bill, indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(make_bill(sys.argv[1]))
