"""The rules of the house that a machine can check, over the whole tree.

What ruff and mypy already say is not said again here.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("controlplane", "core", "gateway", "governance", "nodes", "runner", "wire")
MAX_FUNCTION_LINES = 80
MAX_MODULE_LINES = 800
TABLES = {"core/limits.py": "a table of fields, as long as the server has bounds"}
"""Modules that may be longer, and why."""

PROCESS_EDGES: dict[str, str] = {
    "controlplane/gateway_server/server.py::GatewayApp._live": "the server is told that it cannot start, and exits",
    "controlplane/reconciling.py::Reconciler._run": "one operation that cannot be looked at must not stop the looks at others",
    "gateway/views/base.py::make_endpoint.application": "the client gets a 500 and the log a traceback; a server would cut",
    "gateway/views/inference.py::make_inference.application": "as above; a stream that had begun is reset instead",
    "core/outbox.py::_Rest.__await__": "throws it into the coroutine it stands for, which raises it again",
}
"""Where a broad exception may end: ``path::function`` and why nothing above could do better."""

PRINTING = ("manage.py", "muster", "controlplane/launcher/", "runner/__main__.py", "runner/app.py", "runner/tiny/")
"""Programs that speak to a person on standard output. Everything else logs."""

FORBIDDEN_MODULE_NAMES = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}

STANDALONE = ("controlplane/launcher/", "controlplane/env.py", "muster", "tools/")
"""Runs before anything is installed: standard library, and the modules of ours that hold to the same."""
STANDALONE_OURS = (
    "controlplane.launcher",
    "tools",
    "controlplane.env",
    "wire.clock",
    "wire.limits",
    "core.limits",
    "wire.credentials",
    "wire.ids",
)

PURE = re.compile(
    r"(wire(/.*)?|\w+/states|nodes/session|gateway/values|gateway/placement|gateway/dialects|governance/thresholds|runner/session)"
    r"(\.py|/__init__\.py)$"
)

TEXT_SUFFIXES = {
    ".cfg",
    ".conf",
    ".css",
    ".html",
    ".js",
    ".json",
    ".lua",
    ".md",
    ".py",
    ".sh",
    ".sql",
    ".svg",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
    "",
}


@dataclass(frozen=True, slots=True)
class Function:
    """One function of the tree and where it stands."""

    path: str
    qualname: str
    node: ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_files() -> tuple[str, ...]:
    """Return every file of the repository that git would commit, relative to its root."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, capture_output=True, check=False, text=True)
    if listed.returncode != 0:  # A source archive without git.
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        hidden = {".venv", ".git", ".muster", "__pycache__", "node_modules", "staticfiles"}
        return tuple(sorted(str(path) for path in found if not hidden & set(path.parts)))
    return tuple(sorted(name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()))


def shipped_modules(*, migrations: bool = False) -> list[str]:
    """Return the Python files of what is installed and run, tests and benchmarks left out."""
    names = [name for name in tree_files() if name.endswith(".py") and name.split("/")[0] in PACKAGES]
    if not migrations:
        names = [name for name in names if "/migrations/" not in name]
    return [*names, *(name for name in ("manage.py", "muster") if (ROOT / name).is_file())]


@cache
def parse(name: str) -> ast.Module:
    """Return the syntax tree of a file, which stays as text when it is not Python."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return ast.parse(text if name.endswith(".py") or "python" in text.partition("\n")[0] else "", name)


def walk_functions(name: str) -> Iterator[Function]:
    """Yield every function of a module, nested ones too."""

    def visit(node: ast.AST, scope: tuple[str, ...]) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = (*scope, child.name)
                yield Function(name, ".".join(inner), child)
                yield from visit(child, inner)
            elif isinstance(child, ast.ClassDef):
                yield from visit(child, (*scope, child.name))
            else:
                yield from visit(child, scope)

    yield from visit(parse(name), ())


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every import of a module, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # ``from wire import clock`` names a module of a package at the top.
            inner = [f"{node.module}.{alias.name}" for alias in node.names] if node.module in PACKAGES else [node.module]
            yield from ((node.lineno, name) for name in inner)


def text_files() -> list[str]:
    """Return the files a person reads, lock files left out."""
    locks = {f"requirements/{name}.txt" for name in ("dev", "engines", "installer", "runner", "server")}
    return [name for name in tree_files() if Path(name).suffix in TEXT_SUFFIXES and name not in locks | {"LICENSE"}]


@pytest.mark.timeout(180)
def test_import_contracts_hold() -> None:
    program = "from importlinter.cli import lint_imports_command as lint; lint(['--no-cache'], prog_name='lint-imports')"
    linted = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout[-4000:] + linted.stderr[-2000:]


def test_every_pure_module_is_named_in_the_purity_contract() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    named = next(contract["source_modules"] for contract in contracts if contract.get("id") == "pure")
    found = {match.group(1).replace("/", ".") for name in shipped_modules() if (match := PURE.fullmatch(name))}
    uncovered = {module for module in found if not any(module == n or module.startswith(n + ".") for n in named)}
    assert not uncovered, f"add to the contract 'pure' in pyproject.toml: {sorted(uncovered)}"


def test_the_launcher_needs_only_the_standard_library() -> None:
    outside = [
        f"{name}:{line} {module}"
        for name in shipped_modules()
        if name.startswith(STANDALONE)
        for line, module in imported_names(parse(name))
        if module.split(".")[0] not in sys.stdlib_module_names and not module.startswith(STANDALONE_OURS)
    ]
    assert not outside, outside


def test_migrations_import_nothing_of_the_apps() -> None:
    ours = {"controlplane", "core", "gateway", "governance", "nodes", "runner"}
    found = [
        f"{name}:{line} {module}"
        for name in shipped_modules(migrations=True)
        if "/migrations/" in name
        for line, module in imported_names(parse(name))
        if module.split(".")[0] in ours
    ]
    assert not found, found


def test_migrations_are_complete() -> None:
    from django.apps import apps
    from django.db.migrations.autodetector import MigrationAutodetector
    from django.db.migrations.loader import MigrationLoader
    from django.db.migrations.state import ProjectState

    loader = MigrationLoader(None)
    assert not loader.detect_conflicts()
    missing = MigrationAutodetector(loader.project_state(), ProjectState.from_apps(apps)).changes(graph=loader.graph)
    ours = {label: [m.operations for m in found] for label, found in missing.items() if label in PACKAGES}
    assert not ours, f"run ./muster manage makemigrations: {ours}"


def test_functions_fit_a_screen() -> None:
    long = [
        f"{f.path}::{f.qualname} has {f.node.end_lineno - f.node.lineno + 1} lines"
        for name in shipped_modules()
        for f in walk_functions(name)
        if f.node.end_lineno is not None and f.node.end_lineno - f.node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long, long


def test_modules_stay_small() -> None:
    counts = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in shipped_modules()}
    assert not {name: count for name, count in counts.items() if count > MAX_MODULE_LINES and name not in TABLES}


def test_module_names_say_what_is_inside() -> None:
    assert not [name for name in shipped_modules() if FORBIDDEN_MODULE_NAMES & set(Path(name).with_suffix("").parts)]


def _is_broad(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Tuple):
        return any(_is_broad(part) for part in node.elts)
    return node is None or (isinstance(node, ast.Name) and node.id in {"Exception", "BaseException"})


def _swallows(node: ast.AST) -> bool:
    """Return whether a node catches everything and does not raise it again."""
    if isinstance(node, ast.ExceptHandler):
        last = node.body[-1]
        return _is_broad(node.type) and not (isinstance(last, ast.Raise) and last.exc is None)
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        return called == "suppress" and any(_is_broad(argument) for argument in node.args)
    return False


def _swallowing_places() -> Iterator[str]:
    for name in shipped_modules():
        # Innermost function first, so that each place is named once.
        functions = sorted(walk_functions(name), key=lambda f: -f.node.lineno)
        for node in ast.walk(parse(name)):
            if _swallows(node):
                line = getattr(node, "lineno", 0)
                owners = (f.qualname for f in functions if f.node.lineno <= line <= (f.node.end_lineno or 0))
                yield f"{name}::{next(owners, '<module>')}"


def test_broad_exceptions_end_only_at_process_edges() -> None:
    places = set(_swallowing_places())
    assert not places - set(PROCESS_EDGES), "name the exception, or add the place and its reason to PROCESS_EDGES"
    assert not set(PROCESS_EDGES) - places, "no longer there: take it off PROCESS_EDGES"


def test_nothing_prints_but_programs_for_people() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name in shipped_modules()
        if not name.startswith(PRINTING)
        for node in ast.walk(parse(name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not found, found


def test_every_function_says_what_it_takes_and_returns() -> None:
    bare: list[str] = []
    for name in shipped_modules():
        if name == "muster":
            continue  # Old interpreters must be able to read it, to be told which one is needed.
        for f in walk_functions(name):
            arguments = f.node.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            named += [extra for extra in (arguments.vararg, arguments.kwarg) if extra is not None]
            missing = [a.arg for a in named if a.annotation is None and a.arg not in {"self", "cls", "mcs"}]
            if missing or f.node.returns is None:
                bare.append(f"{f.path}:{f.node.lineno} {f.qualname} {missing or 'returns'}")
    assert not bare, bare


def test_every_module_says_what_it_is() -> None:
    modules = [name for name in shipped_modules() if (ROOT / name).stat().st_size]
    assert not [name for name in modules if not ast.get_docstring(parse(name)) and name.endswith(".py")]


def test_no_path_of_a_developers_machine_is_in_the_tree() -> None:
    roots = "|".join(("wo" + "rk", "tm" + "p/w", "ro" + "ot", "ho" + r"me/\w+"))
    private = re.compile(rf"(?<![\w./>}}-])/({roots})/|\.\./sha" + r"red\b")
    found = [
        f"{name}:{number} {line.strip()[:100]}"
        for name in text_files()
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1)
        if private.search(line)
    ]
    assert not found, found


def test_text_files_are_clean() -> None:
    dirty: list[str] = []
    for name in text_files():
        text = (ROOT / name).read_bytes().decode("utf-8")
        if text and (not text.endswith("\n") or text.endswith("\n\n")):
            dirty.append(f"{name}: must end with one newline")
        if "\r" in text:
            dirty.append(f"{name}: carriage return")
        dirty += [f"{name}:{n} trailing whitespace" for n, line in enumerate(text.split("\n"), 1) if line != line.rstrip()]
    assert not dirty, dirty


@pytest.mark.parametrize("name", [n for n in tree_files() if n.endswith((".html", ".css", ".js"))] or ["manage.py"])
def test_pages_load_nothing_from_other_servers(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    foreign = re.findall(r"""(?:src|href|@import|url\()\s*=?\s*["'(]?((?:https?:)?//[^\s"')]+)""", text)
    assert not [url for url in foreign if not url.startswith(("http://www.w3.org/", "https://www.w3.org/"))]


def test_a_wheel_holds_every_package_that_ships_and_the_templates() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        setuptools = tomllib.load(file)["tool"]["setuptools"]
    assert setuptools["packages"]["find"]["include"] == sorted(f"{name}*" for name in (*PACKAGES, "templates"))
    assert setuptools["package-data"] == {"*": ["*"]}
    top = {name.split("/")[0] for name in tree_files() if name.endswith("/__init__.py")}
    assert top - set(PACKAGES) == {"benchmarks", "conformance", "tests", "tools"}, (
        "a package at the top either ships or is named here"
    )
