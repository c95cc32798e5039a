"""What we are made of: known advisories, licences, and a bill of materials for each set that is installed somewhere."""

from __future__ import annotations

import importlib.util
import json
import re
from datetime import date
from importlib.metadata import distributions
from typing import Any  # a bill is JSON

from packaging.markers import Marker

from tools import advisories, licences
from tools.package.checks import Check, CheckFailed, Failed, NotHere, Outcome, Passed, Workplace
from tools.package.installed import make_node, make_server
from wire import RELEASE, clock

_SHIPPED = {"server": make_server, "runner": make_node}


def _check_advisories(place: Workplace) -> Outcome:
    told = advisories.read_snapshot(place.root)
    today = clock.now().date()
    pins = advisories.list_pins(place.root)
    found = advisories.find_open(pins, told["advisories"], advisories.read_accepted(place.root), today)
    if found:
        return Failed("\n".join(found))
    days = (today - date.fromisoformat(told["as_of"])).days
    count = len({(pin.name, pin.version) for pin in pins})
    said = f"{count} pins are under none of {len(told['advisories'])} advisories of these packages, as of {told['as_of']}"
    if days > advisories.FRESH_DAYS:
        return NotHere(
            f"the snapshot is {days} days old: renew it by ./muster lock --advisories where OSV is reachable; {said}"
        )
    return Passed(said)


def _check_licences(place: Workplace) -> Outcome:
    table = licences.read_table(place.root)
    wrong = list(licences.find_refused(table))
    wrong += [f"{licences.FILE} lacks {name}" for name in licences.list_locked(place.root) if name not in table]
    names = {licence for licence, _ in table.values()}
    return Failed("\n".join(wrong)) if wrong else Passed(f"{len(table)} packages under {len(names)} licences")


def _write_bills(place: Workplace) -> Outcome:
    """Write the bills and compare each with what an empty environment holds after its set was installed."""
    make_bill = _load_sbom(place)
    wrong, found = [], []
    for lock, make in _SHIPPED.items():
        text = make_bill(lock)
        bill = json.loads(text)
        (place.out / f"muster-{RELEASE}-{lock}.cdx.json").write_text(text, encoding="utf-8")
        wrong += [f"{lock}: {one['name']} has no licence or hash" for one in bill["components"] if not _is_whole(one)]
        folder = place.make_once(lock, make)
        python = dict(line.split(" = ", 1) for line in (folder / "pyvenv.cfg").read_text(encoding="utf-8").splitlines())
        installed = {
            (re.sub(r"[-_.]+", "-", each.name).lower(), each.version)
            for each in distributions(path=[str(folder) for folder in folder.glob("lib/python*/site-packages")])
        } - {("muster", RELEASE)}
        stated = {(one["name"], one["version"]) for one in bill["components"] if _holds_here(one, python["version"])}
        wrong += [f"{lock}: the bill and what is installed differ in {name} {version}" for name, version in installed ^ stated]
        found.append(f"{lock}: {len(bill['components'])} components, {len(stated)} of them installed on this system")
    return Failed("\n".join(wrong)) if wrong else Passed("\n".join(found))


def _load_sbom(place: Workplace) -> Any:  # Any: a script of the repository, which is no module
    spec = importlib.util.spec_from_file_location("sbom", place.root / "requirements" / "sbom.py")
    if spec is None or spec.loader is None:
        raise CheckFailed("requirements/sbom.py is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_bill


def _is_whole(component: dict[str, Any]) -> bool:
    return bool(component.get("licenses")) and (bool(component.get("hashes")) or not component["purl"].startswith("pkg:pypi/"))


def _holds_here(component: dict[str, Any], python: str) -> bool:
    markers = [each["value"] for each in component.get("properties", ()) if each["name"] == "muster:marker"]
    return component["purl"].startswith("pkg:pypi/") and all(
        Marker(marker).evaluate({"python_full_version": python}) for marker in markers
    )


CHECKS = (
    Check("advisories", "no locked package is under a known advisory that nobody accepted", _check_advisories),
    Check("licences", "each locked package has a licence of the list", _check_licences),
    Check("sbom", "the bills of materials name what is installed, with hashes and licences", _write_bills),
)
