"""Alerts, recording rules and the scrape configuration: Prometheus' own tool reads them, and they fire when they should."""

from __future__ import annotations

import re
from pathlib import Path

from tools.package.checks import Check, CheckFailed, NotHere, Outcome, Passed, Workplace, find_program

_FOLDER = Path("deploy") / "prometheus"


def _check(place: Workplace) -> Outcome:
    promtool = find_program("promtool")
    if promtool is None:
        return NotHere("there is no promtool (Debian: prometheus)")
    rules = sorted((place.root / _FOLDER).glob("*.yaml"))
    count = sum(map(int, re.findall(r"(\d+) rules found", place.call(promtool, "check", "rules", *rules))))
    if not count:
        raise CheckFailed("promtool found no rules")
    # It looks for the files of credentials where the installation has them.
    folder = place.make_folder("prometheus")
    config = (place.root / _FOLDER / "scrape" / "prometheus.yaml").read_text(encoding="utf-8")
    for name in ("muster_token", "muster_node_key"):
        (folder / name).write_text("x", encoding="utf-8")
    config = config.replace("/etc/prometheus/rules", str(place.root / _FOLDER)).replace("/etc/prometheus", str(folder))
    (folder / "prometheus.yaml").write_text(config, encoding="utf-8")
    place.call(promtool, "check", "config", folder / "prometheus.yaml")
    place.call(promtool, "test", "rules", place.root / _FOLDER / "scrape" / "alerts_test.yaml")
    return Passed(f"{count} rules, the scrape configuration, and promtool's tests of the rules")


CHECKS = (Check("alerts", "Prometheus takes the rules and the scrape configuration, and alerts fire when they should", _check),)
