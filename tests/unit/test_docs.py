"""The documentation is true to the code where a machine can tell: settings, codes, commands, links, dependencies."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.metrics import MetricWrapperBase

from controlplane.commands import MODULES
from core.limits import Limits
from wire.contract import ErrorCode, NodeStatus, RequestState
from wire.credentials import CREDENTIAL_PATTERN, CredentialKind, mint_credential
from wire.limits import list_bounds

ROOT = Path(__file__).resolve().parents[2]
OUR_COMMANDS = [name for names in MODULES.values() for name in names]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
READERS = {
    "read_text",
    "read_int",
    "read_float",
    "read_bool",
    "read_list",
    "read_networks",
    "read_path",
    "read_log_level",
    "read_valkey",
    "read_choice",
    "read_secret",
    "read_name",
    "read_address",
    "read_issuer",
    "read_role",
    "read_roles",
}
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(path: Path) -> str:
    return FENCE.sub("", read(path))


def anchors(path: Path) -> set[str]:
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose(path)))
    return {text.strip().replace(" ", "-") for text in plain}


def shell_lines() -> list[tuple[Path, str]]:
    """Return every command in the ``sh`` blocks of all pages, continuation lines joined."""
    found: list[tuple[Path, str]] = []
    for page in PAGES:
        for _, language, code in FENCE.findall(read(page)):
            if language.split()[:1] == ["sh"]:
                joined = code.replace("\\\n", " ").splitlines()
                found += [(page, line.strip()) for line in joined if line.strip() and not line.lstrip().startswith("#")]
    return found


def variables_read_by(path: Path) -> set[str]:
    calls = (node for node in ast.walk(ast.parse(read(path))) if isinstance(node, ast.Call) and node.args)
    names = ((call.func, call.args[0]) for call in calls)
    return {
        argument.value
        for function, argument in names
        if isinstance(function, ast.Name) and function.id in READERS
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


def documented_rows(page: Path) -> dict[str, str]:
    cells = (line.strip().strip("|").split("|") for line in prose(page).splitlines() if line.startswith("|"))
    return {row[0].strip(" `"): row[1].strip(" `") for row in cells if len(row) > 1}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    broken: list[str] = []
    for target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        if not other.exists() or (anchor and other.suffix == ".md" and anchor not in anchors(other)):
            broken.append(target)
    assert not broken


def test_the_pages_stay_short() -> None:
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    assert sum(len(read(page).split()) for page in pages) <= 30_000
    cells = (cell for page in pages for line in prose(page).splitlines() if line.startswith("|") for cell in line.split(" | "))
    assert not [cell for cell in cells if len(cell.split()) > 27], "a cell of a table is no paragraph"


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        targets = (target.partition("#")[0] for target in LINK.findall(prose(page)) if "://" not in target)
        waiting += [(page.parent / target).resolve() for target in targets if target]
    assert not {page.name for page in DOCS.rglob("*.md")} - {page.name for page in reached}


def test_every_setting_is_documented_and_every_documented_one_exists() -> None:
    bounds = (bound for section in fields(Limits()) for bound in list_bounds(getattr(Limits(), section.name)))
    settings = variables_read_by(ROOT / "controlplane" / "settings.py") | {bound.setting for bound in bounds if bound.setting}
    rows = {name for name in documented_rows(DOCS / "settings.md") if re.fullmatch(r"[A-Z][A-Z0-9_]+", name)}
    assert settings - rows == set(), "add them to tests/unit/test_settings_page.py"
    assert rows - settings == set(), "docs/settings.md names variables that nobody reads"


def test_documented_defaults_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ast.parse(read(ROOT / "controlplane" / "settings.py"))
    rows = documented_rows(DOCS / "settings.md")
    wrong: dict[str, tuple[str, str]] = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if not (isinstance(call.func, ast.Name) and call.func.id in {"read_int", "read_float", "read_bool"}):
            continue
        name = ast.literal_eval(call.args[0])
        given = call.args[1] if len(call.args) > 1 else next(k.value for k in call.keywords if k.arg == "default")
        value = eval(compile(ast.Expression(given), "settings", "eval"), {"__builtins__": {}})
        shown = {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value:g}" if value < 1e6 else f"{value}"
        if rows.get(name) != shown:
            wrong[name] = (rows.get(name, "missing"), shown)
    assert not wrong, "docs/settings.md shows (left) what is not the default (right)"


def test_every_option_of_the_box_is_documented() -> None:
    page = read(DOCS / "nodes.md") + read(DOCS / "from-modelrelay.md")
    source = read(ROOT / "runner" / "config.py")
    options = set(re.findall(r'add\("(--[a-z-]+)"', source))
    # Whole words in capitals: the runner's own variables, and those of the model-runner and llm-pool specifications.
    variables = set(re.findall(r"MUSTER_[A-Z_]+|(?<=\")[A-Z]+(?:_[A-Z]+)+(?=\")", source))
    assert len(options) > 20
    assert len(variables) > 30
    assert not {option for option in options if f"`{option}" not in page and f" {option} " not in page}
    assert not {name for name in variables if name not in page and not name.startswith("TINY_MODEL_")}


def test_the_page_for_users_of_modelrelay_has_every_alias_and_no_other() -> None:
    from controlplane.env import ALIASES
    from runner.config import ALIASES as OF_NODES

    server, _, node = read(DOCS / "from-modelrelay.md").partition("\n## The worker\n")
    for text, aliases in ((server, ALIASES), (node.partition("\n## ")[0], OF_NODES)):
        shown = re.findall(r"^\| `(?:(--[a-z-]+)`, `)?([A-Z_]+)` \| `([A-Z_]+)`", text, re.MULTILINE)
        assert sorted(shown) == sorted((alias.flag, alias.theirs, alias.ours) for alias in aliases)


def test_every_error_code_and_state_is_documented() -> None:
    page = read(DOCS / "api.md")
    words = [*ErrorCode, *RequestState, *NodeStatus]
    assert not [word.value for word in words if f"`{word.value}`" not in page]


def test_the_documented_status_of_every_gateway_error_is_its_status() -> None:
    from gateway import errors

    rows = re.findall(r"^\| `([A-Za-z_]+)` \| ([^|]+) \|", read(DOCS / "api.md"), flags=re.MULTILINE)
    documented = {(code, int(status)) for code, text in rows for status in re.findall(r"\b[1-5]\d\d\b", text)}
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, errors.GatewayError)]
    assert len(classes) > 10
    assert not {(each.code.value, each.status) for each in classes} - documented


def test_every_documented_line_of_a_log_is_one_that_a_program_writes() -> None:
    rows = read(DOCS / "troubleshoot.md").split("## A line in the log\n")[1].splitlines()
    events = [event for row in rows for event in re.findall(r"`([a-z_.]+)`", row.split(" | ")[0])]
    packages = ("controlplane", "core", "gateway", "governance", "nodes", "wire")
    sources = "".join(read(path) for package in packages for path in sorted((ROOT / package).rglob("*.py")))
    assert len(events) > 20
    assert not [event for event in events if f'"{event}' not in sources]


def test_the_published_pattern_finds_every_kind_of_credential() -> None:
    assert f"```regex\n{CREDENTIAL_PATTERN}\n```" in read(DOCS / "api.md")
    for kind in CredentialKind:
        assert re.search(CREDENTIAL_PATTERN, f"key={mint_credential(kind).text};")


def write_series(families: Iterable[Any]) -> list[str]:  # Any: of two kinds that have no base in common
    """Return the names of families of ours with their labels, as the pages write them."""
    written = set()
    for family in families:
        kind = getattr(family, "_type", "") or family.type
        name = getattr(family, "_name", "") or family.name
        labels = ",".join(family._labelnames)
        if name.startswith("muster_"):
            written.add(name + ("_total" if kind == "counter" else "") + (f"{{{labels}}}" if labels else ""))
    return sorted(written)


def read_series(heading: str) -> list[str]:
    section = read(DOCS / "observe.md").split(f"\n### {heading}\n")[1].split("\n#")[0]
    return sorted(re.findall(r"`(muster_[^`]+)`", section.partition("\n\nEvery gateway")[0]))


def test_the_documented_metrics_of_gateways_are_those_of_the_registry_with_their_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gateway import metrics as of_gateway
    from nodes import agents, channel, consumers
    from nodes.links import registry
    from nodes.links.keeper import FLEET

    monkeypatch.setattr(of_gateway.COUNTERS, "tells_tenants", True)
    held = [value for module in (of_gateway, agents, channel, consumers, registry) for value in vars(module).values()]
    families: list[Any] = [value for value in held if isinstance(value, MetricWrapperBase)]
    families += [family for own in (of_gateway.COUNTERS, FLEET) for family in own.collect()]
    assert read_series("Of a gateway") == write_series(families)


@pytest.mark.django_db
def test_the_documented_metrics_of_the_control_plane_are_those_of_its_registry() -> None:
    from controlplane import metrics as of_control

    families: list[Any] = [of_control.REQUESTS, of_control.SECONDS, *of_control.ControlFigures().collect()]
    assert read_series("Of the control plane") == write_series(families)


def test_every_dependency_has_its_line() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = {re.split(r"[\[<>=;~! ]", line)[0] for group in groups for line in group} - {"muster"}
    listed = set(documented_rows(DOCS / "adr" / "0007-dependencies.md"))
    assert wanted - listed == set(), "add a line to docs/adr/0007-dependencies.md"
    assert listed - wanted - {"Package", "---"} == set(), "docs/adr/0007-dependencies.md lists what nobody depends on"


def test_every_command_in_the_pages_exists_and_every_one_of_ours_is_there() -> None:
    from django.core.management import get_commands

    from controlplane.launcher.cli import build_parser

    (known,) = [set(action.choices) for action in build_parser()._actions if isinstance(action.choices, dict)]
    text = "".join(read(page) for page in PAGES)
    assert set(re.findall(r"\./muster ([a-z]+(?:-[a-z]+)*)", text)) <= known
    used = set(re.findall(r"(?:muster manage|manage\.py) ([a-z_]+)", text))
    assert used
    assert used <= {*get_commands(), *OUR_COMMANDS}
    files = {path for _, line in shell_lines() for path in re.findall(r"(?<![\w/.])docker/\w+\.\w+", line)}
    assert files
    assert not [path for path in files if not (ROOT / path).exists()]
    assert not [name for name in OUR_COMMANDS if f"| `{name} " not in read(DOCS / "operate.md")]
    decisions = [page.name for page in (DOCS / "adr").glob("0*.md")]
    assert decisions
    assert not [name for name in decisions if name not in read(DOCS / "adr" / "README.md")]


def test_every_command_is_run_by_a_test_or_listed_as_tried_or_not_tried_by_hand() -> None:
    listed = read(DOCS / "verified.md")
    silent: list[str] = []
    for page in PAGES:
        for _, language, code in FENCE.findall(read(page)):
            first = next((line for line in code.splitlines() if line and not line.startswith("#")), "")
            if language == "sh" and first not in listed:
                silent.append(f"{page.name}: {first}")
    assert not silent, "mark the block ```sh run, or list its first line in docs/verified.md"


def test_every_endpoint_is_documented() -> None:
    from drf_spectacular.generators import SchemaGenerator

    from gateway.dialects.surface import SURFACES

    page = read(DOCS / "api.md")
    routes = re.findall(r'_route\("([a-z0-9/]+)', read(ROOT / "gateway" / "urls.py"))
    assert len(routes) > 5
    gateway_paths = {*SURFACES, *(f"/{route.rstrip('/')}" for route in routes if not route.startswith("internal"))}
    described = SchemaGenerator().get_schema(public=True)["paths"]  # type: ignore[no-untyped-call]  # drf-spectacular
    assert described
    control_paths = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    assert not [path for path in gateway_paths if path not in page]
    assert not [path for path in control_paths if f"`{path.rstrip('/')}" not in page]
