"""What each program imports must stand in the lock file it is installed from, not only in that of the developers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVER = (
    "controlplane.gateway_server.server",
    "controlplane.daphne_server.server",
    "controlplane.asgi",
    "controlplane.serve_worker",
    "gateway.urls",
)
IMPORT_WITHOUT_THE_REST = """
import importlib, importlib.metadata, json, os, re, sys
modules, locked = json.loads(sys.argv[1]), set(json.loads(sys.argv[2]))
owners = importlib.metadata.packages_distributions()
missing = {
    name for name, found in owners.items()
    if not any(re.sub(r"[-_.]+", "-", one).lower() in locked for one in found)
}
class Filtered:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in missing else self.finder.find_spec(name, path, target)
for name in [name for name in sys.modules if name.partition(".")[0] in missing]:
    del sys.modules[name]
sys.meta_path[:] = [Filtered(finder) for finder in sys.meta_path if hasattr(finder, 'find_spec')]
if modules[0].startswith("controlplane"):
    os.environ["DJANGO_SETTINGS_MODULE"] = "controlplane.settings"
    import django
    django.setup()
for name in modules:
    importlib.import_module(name)
print(len(missing))
"""


def list_locked(name: str) -> set[str]:
    """Return the names of the packages in a lock file, in PyPI's normal form."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return {normalise(line.partition("==")[0]) for line in lines if "==" in line and line[:1].isalnum()}


def normalise(name: str) -> str:
    """Return a package name in PyPI's normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.partition("[")[0]).lower()


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("lock", "modules"), [("server", SERVER), ("runner", ("runner.__main__", "runner.app"))])
def test_a_program_imports_nothing_that_its_lock_file_lacks(lock: str, modules: tuple[str, ...]) -> None:
    locked = sorted(list_locked(lock))
    assert len(locked) > 10
    command = [sys.executable, "-c", IMPORT_WITHOUT_THE_REST, json.dumps(modules), json.dumps(locked)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    assert int(found.stdout) > 10, "the developers' packages have to be there, to be kept away"


@pytest.mark.parametrize("lock", ["server", "runner", "engines", "installer", "dev"])
def test_the_bill_of_materials_names_what_is_locked_with_all_its_hashes_and_nothing_else(lock: str) -> None:
    said = subprocess.run([sys.executable, "requirements/sbom.py", lock], cwd=ROOT, capture_output=True, text=True, check=True)
    bill = json.loads(said.stdout)
    text = (ROOT / "requirements" / f"{lock}.txt").read_text()
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert {normalise(one["name"]) for one in bill["components"]} == list_locked(lock)
    assert len({one["bom-ref"] for one in bill["components"]}) == len(bill["components"])
    for number, one in enumerate(bill["components"]):
        start = text.index(f"{one['name']}=={one['version']}")
        after = bill["components"][number + 1 :]
        end = text.index(f"\n{after[0]['name']}=={after[0]['version']}", start) if after else len(text)
        assert one["purl"] == f"pkg:pypi/{normalise(one['name'])}@{one['version']}"
        assert [made["content"] for made in one["hashes"]] == re.findall("sha256:([0-9a-f]{64})", text[start:end])
        assert one["hashes"]
