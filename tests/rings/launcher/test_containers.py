"""Images and every service of Compose, in namespaces of the kernel in the place of Docker."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.launcher.environment import ROOT
from tools.package.compose import list_started, read_compose
from tools.package.containers import PROFILES, VARIABLES
from tools.package.images import explain_no_namespaces, run_containers

pytestmark = pytest.mark.timeout(1600)


def test_images_are_built_by_their_steps_and_services_are_healthy_in_their_order_and_answer(tmp_path: Path) -> None:
    if why := explain_no_namespaces():
        pytest.skip(why)
    found = run_containers(tmp_path, ROOT)
    assert not [each["failed"] for each in found if "failed" in each], found
    wanted = list_started(read_compose(ROOT / "docker" / "compose.yaml", VARIABLES), PROFILES)
    assert [each["service"] for each in found if "service" in each] == wanted
    assert all(each["pieces"] > 2 for each in found if "answered" in each)
    assert {each["built"] for each in found if "built" in each} == {"Dockerfile.server", "Dockerfile.runner"}
