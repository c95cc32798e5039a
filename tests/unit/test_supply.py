"""What we are made of: which advisories a pin is under, and that the list of licences is true."""

from __future__ import annotations

import json
import zipfile
from datetime import date
from pathlib import Path
from typing import Any  # records of OSV are JSON

import pytest

from controlplane.launcher.console import LauncherError
from controlplane.launcher.environment import ROOT
from tools import advisories, licences
from tools.advisories import Accepted, Pin, find_open, is_affected
from wire import clock

DAY = date(2026, 11, 28)


def record(**changes: object) -> dict[str, Any]:
    affected = {
        "package": {"ecosystem": "PyPI", "name": "Some_Package"},
        "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "1.0"}, {"fixed": "1.4"}]}, {"type": "GIT", "events": []}],
    }
    about = {"id": "PYSEC-1", "aliases": ["CVE-1"], "modified": "2026-11-01T00:00:00Z", "details": "Bad.\nVery."}
    return {**about, "affected": [affected], **changes}


def renew(root: Path, *records: dict[str, Any]) -> dict[str, Any]:
    (root / "requirements").mkdir(exist_ok=True)
    (root / "requirements" / "server.txt").write_text("some-package==1.2 \\\n    --hash=sha256:00\n")
    with zipfile.ZipFile(root / "all.zip", "w") as archive:
        for number, each in enumerate(records):
            archive.writestr(f"{number}.json", json.dumps(each))
    advisories.renew(root, str(root / "all.zip"))
    return advisories.read_snapshot(root)


def test_a_snapshot_keeps_what_is_about_locked_packages_and_was_not_withdrawn(tmp_path: Path) -> None:
    other = {"package": {"ecosystem": "npm", "name": "some-package"}, "versions": ["1.0"]}
    told = renew(tmp_path, record(), record(id="X", withdrawn="2026-01-01T00:00:00Z"), record(id="Y", affected=[other]))
    assert (told["as_of"], told["read"], told["source"]) == ("2026-11-01", 3, "all.zip")
    assert [(one["id"], one["package"], one["summary"]) for one in told["advisories"]] == [
        ("PYSEC-1", "some-package", "Bad. Very.")
    ]


@pytest.mark.parametrize("content", [b"", b"no archive"])
def test_an_archive_that_cannot_be_read_is_one_line_and_leaves_the_snapshot(content: bytes, tmp_path: Path) -> None:
    kept = renew(tmp_path, record())
    (tmp_path / "all.zip").write_bytes(content)
    with pytest.raises(LauncherError, match=r"cannot read advisories from .*all\.zip: .* Name a copy"):
        advisories.renew(tmp_path, str(tmp_path / "all.zip"))
    assert advisories.read_snapshot(tmp_path) == kept


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.9", False), ("1.0", True), ("1.4rc1", True), ("1.4", False), ("1.10", False), ("2.1", True), ("3", False)],
)
def test_a_version_is_affected_between_its_introduction_and_its_fix(version: str, expected: bool) -> None:
    ranges = [[{"introduced": "1.0"}, {"fixed": "1.4"}, {"introduced": "2"}, {"last_affected": "2.1"}]]
    assert is_affected({"ranges": ranges, "versions": []}, version) is expected
    assert is_affected({"ranges": [], "versions": ["1.0"]}, version) is (version == "1.0")


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        ([], 1),
        ([Accepted("CVE-1", "some-package", "never called", DAY)], 0),
        ([Accepted("CVE-1", "another", "never called", DAY)], 1),
        ([Accepted("PYSEC-1", "some-package", "never called", date(2026, 11, 27))], 1),
    ],
    ids=["nobody", "until today", "another package", "until yesterday"],
)
def test_an_advisory_is_told_once_unless_it_was_accepted_for_today(
    accepted: list[Accepted], expected: int, tmp_path: Path
) -> None:
    told = renew(tmp_path, record(), record(id="GHSA-1", aliases=["CVE-1", "PYSEC-1"]))
    pins = [Pin("some-package", "1.2", "server"), Pin("some-package", "1.2", "dev"), Pin("some-package", "1.4", "runner")]
    lines = find_open(pins, told["advisories"], accepted, DAY)
    assert len(lines) == expected
    assert all(line.startswith("some-package 1.2 in server dev: CVE-1 PYSEC-1") for line in lines)
    assert ["(accepted until 2026-11-27)" in line for line in lines] == [
        len(accepted) == 1 and accepted[0].until < DAY
    ] * expected


def test_no_locked_package_is_under_an_advisory_of_the_snapshot() -> None:
    known = advisories.read_snapshot(ROOT)["advisories"]
    assert not find_open(advisories.list_pins(ROOT), known, advisories.read_accepted(ROOT), clock.now().date())


def test_the_list_of_licences_is_what_the_locked_packages_say_and_allows_each() -> None:
    assert (ROOT / licences.FILE).read_text(encoding="utf-8") == licences.print_table(ROOT), "run ./muster lock --licences"
    assert not list(licences.find_refused(licences.read_table(ROOT)))


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True), ("MIT AND AGPL-3.0-only", False), ("MIT OR AGPL-3.0-only", True), ("", False), ("see LICENSE", False),
        ("MIT OR AGPL-3.0-only AND SSPL-1.0", True), ("(MIT OR AGPL-3.0-only) AND SSPL-1.0", False), ("(MIT", False),
        ("Apache-2.0 WITH LLVM-exception", True), ("MIT AND (BSD-3-Clause OR SSPL-1.0)", True), ("MIT/X11", False),
    ],
)  # fmt: skip
def test_of_two_licences_both_have_to_be_allowed_unless_one_may_be_chosen(expression: str, expected: bool) -> None:
    assert licences.is_allowed(expression, licences.SHIPPED) is expected


def test_what_is_not_installed_is_read_from_a_report_of_pip_and_kept(tmp_path: Path) -> None:
    told = {"name": "Some_Package", "license": "Apache License", "classifier": []}
    (tmp_path / "report.json").write_text(json.dumps({"install": [{"metadata": told}, {"metadata": {"name": "mute"}}]}))
    assert licences.read_report(tmp_path / "report.json") == {"some-package": "Apache-2.0", "mute": "NOASSERTION"}
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(LauncherError, match="is no report of pip"):
        licences.read_report(tmp_path / "report.json")
