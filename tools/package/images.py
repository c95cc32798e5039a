"""Images and Compose: files that hold together, and, where the kernel lets us, everything they start, without Docker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.package.checks import Check, Failed, NotHere, Outcome, Passed, Workplace, find_program, format_bytes
from tools.package.compose import ComposeError, find_faults, list_mounts, read_compose
from tools.package.containers import DOCKER, IMAGES
from tools.package.dockerfile import DockerfileError, read_stages
from wire import RELEASE

DOCKERFILES = ("Dockerfile.server", "Dockerfile.runner", "Dockerfile.runner-cuda")
_WITHIN_S = 1500.0
_LOCKED = {**dict.fromkeys(IMAGES, f"x@sha256:{'0' * 64}"), "MUSTER_VERSION": RELEASE}
_NAMED = {"MUSTER_CONTROL_NAME": "muster.example.com", "MUSTER_GATEWAY_NAME": "gateway.example.com"}


def _check_dockerfiles(place: Workplace) -> Outcome:
    wrong = []
    for name in DOCKERFILES:
        try:
            read_stages(DOCKER / name, {**IMAGES, "MUSTER_VERSION": RELEASE})
        except (DockerfileError, ComposeError) as error:
            wrong.append(f"{name}: {error}")
    hadolint = find_program("hadolint")
    if hadolint is None:
        return Failed("\n".join(wrong)) if wrong else NotHere("hadolint is not installed")
    place.call(hadolint, "--no-color", *(DOCKER / name for name in DOCKERFILES))
    return Failed("\n".join(wrong)) if wrong else Passed(f"{len(DOCKERFILES)} files")


def _check_compose(place: Workplace) -> Outcome:
    path = place.root / "docker" / "compose.yaml"
    wrong = list(dict.fromkeys(_find_compose_faults(path)))
    if wrong:
        return Failed("\n".join(wrong))
    promtool = find_program("promtool")
    if promtool is None:
        return Passed("with and without names of its own; promtool, which reads what it gives Prometheus, is not installed")
    folder = place.make_folder("prometheus")
    (folder / "token").touch()
    text = str(read_compose(path, _LOCKED)["configs"]["prometheus"]["content"])
    text = text.replace("/etc/prometheus/rules", str(place.root / "deploy" / "prometheus"))
    (folder / "prometheus.yaml").write_text(text.replace("/run/secrets/metrics_token", str(folder / "token")), encoding="utf-8")
    place.call(promtool, "check", "config", folder / "prometheus.yaml")
    return Passed("with and without names of its own; Prometheus takes its configuration")


def _find_compose_faults(path: Path) -> Iterator[str]:
    for more in ({}, _NAMED):
        try:
            compose = read_compose(path, _LOCKED | more)
        except ComposeError as error:
            yield str(error)
            continue
        yield from find_faults(compose, path.parent)
        yield from _find_loose_ends(compose)
    for name in _LOCKED:
        try:
            read_compose(path, {each: value for each, value in _LOCKED.items() if each != name})
        except ComposeError:
            continue
        yield f"{name} has a default, or is not used"


def _find_loose_ends(compose: dict[str, Any]) -> Iterator[str]:
    """Yield what is declared and that nobody uses."""
    services = compose["services"].values()
    for kind in ("secrets", "configs"):
        used = {one if isinstance(one, str) else one["source"] for service in services for one in service.get(kind, [])}
        yield from (f"nobody uses {kind[:-1]} {name}" for name in compose[kind] if name not in used)
    sources = {source for service in services for source, _, _ in list_mounts(service)}
    yield from (f"nobody uses volume {name}" for name in compose["volumes"] if name not in sources)


def explain_no_namespaces() -> str:
    """Return why this machine cannot stand in for Docker; empty when it can."""
    if sys.platform != "linux" or not Path("/etc/debian_version").exists():
        return "it takes a Debian, as the images do"
    if os.geteuid() != 0:
        return "it takes root, for mounts and users of their own"
    if missing := [name for name in ("unshare", "setpriv", "chroot", "mount") if shutil.which(name) is None]:
        return f"there is no {', '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "true"], capture_output=True, text=True, check=False
    )
    return f"the kernel gives no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def run_containers(folder: Path, root: Path) -> list[dict[str, Any]]:
    """Build the images and run the services of Compose in namespaces; return what was seen. ``folder`` is a new one."""
    words = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        sys.executable,
        "-m",
        "tools.package.containers",
        str(folder),
    ]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ended = subprocess.run(
        words,
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=_WITHIN_S,
        stdin=subprocess.DEVNULL,
    )
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    if ended.returncode and not any("failed" in each for each in found):
        found.append({"failed": ended.stderr.strip()[-1500:]})
    return found


def _run_services(place: Workplace) -> Outcome:
    if why := explain_no_namespaces():
        return NotHere(why)
    found = run_containers(place.make_folder("containers"), place.root)
    failed = [each for each in found if "failed" in each]
    if failed:
        lines = [f"{name}: {text}" for name, text in failed[0].get("logs", {}).items()]
        return Failed("\n".join([failed[-1]["failed"], *lines]))
    built = [
        f"{each['built']}: {format_bytes(each['bytes'])}, {each['components']} components, {each['seconds']:.0f} s"
        for each in found if "built" in each
    ]  # fmt: skip
    healthy = [f"{each['service']} {each['seconds']:.1f} s" for each in found if "state" in each]
    asked = [f"{each['pieces']} pieces through {each['answered']}" for each in found if "answered" in each]
    skipped = [each["service"] for each in found if "skipped" in each]
    differs = "not Docker: this machine's Debian and Python, databases of the wheels, one network"
    missing = f"; without {', '.join(skipped)}" if skipped else ""
    return Passed("\n".join([", ".join(healthy), *built, ", ".join(asked), differs + missing]))


def _build_with_docker(place: Workplace) -> Outcome:
    if find_program("docker") is None:
        return NotHere("Docker is not installed: base images by digest, and everything of runner-cuda, were not built")
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        return NotHere("no Docker daemon answers: base images by digest, and everything of runner-cuda, were not built")
    if not (DOCKER / ".env").exists():
        return NotHere("docker/lock_images.sh has not been run")
    place.call("docker", "compose", "-f", DOCKER / "compose.yaml", "--profile", "node", "build", within_s=_WITHIN_S)
    return Passed("server and runner")


CHECKS = (
    Check("dockerfiles", "hadolint finds nothing in the Dockerfiles", _check_dockerfiles),
    Check("compose-file", "the Compose file is one by its schema, and names nothing that is not there", _check_compose),
    Check(
        "compose",
        "each image is built by its own steps, each service is healthy in its order, a stream is answered",
        _run_services,
    ),
    Check("docker", "Docker itself builds the images", _build_with_docker),
)
