"""The rules of the house that a machine can check, over the whole tree.

What ruff and mypy already say is not said again here.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import controlplane.authentication
import core.throttle
import gateway.request.identity
import governance.admin_tokens
import nodes.api
import nodes.consumers
import nodes.services.credentials
import wire.credentials
from wire import RELEASE

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("controlplane", "core", "gateway", "governance", "nodes", "runner", "wire")
MAX_FUNCTION_LINES = 80
MAX_MODULE_LINES = 800

LIMITS = ("conformance/exchange.py", "core/limits.py", "runner/limits.py", "wire/limits.py")
NUMBERS: dict[str, str] = {
    # Drawing and printing.
    "controlplane/overview.py": "WIDTH HEIGHT _HOUR",
    "gateway/services/rollups.py": "_MARK _MINUTE _HOUR _DAY",
    "controlplane/playground/snippets.py": "WIDTH",
    # Settings that Django and Celery read by their name.
    "controlplane/settings.py": "SESSION_COOKIE_AGE CELERY_TASK_TIME_LIMIT CELERY_WORKER_ETA_TASK_LIMIT "
    "CELERY_TASK_SOFT_TIME_LIMIT EMAIL_TIMEOUT",
    # The port at which Sentinels listen.
    "core/valkey.py": "_SENTINEL_PORT",
    # Prices are of a million tokens.
    "gateway/values.py": "MILLION",
    # Keys of advisory locks.
    "gateway/tasks.py": "ADVISORY_LOCK RECONCILE_LOCK",
    "governance/operations/runs.py": "_FENCE_LOCK",
    "governance/operations/approvals.py": "_POLICY_LOCK _REVIEW_LOCK",
    "governance/alerts.py": "_LOCK",
    "governance/notices.py": "_UNREADABLE_LOCK _BUDGET_LOCK",
    "governance/operations/proposals.py": "_PROPOSER_LOCK",
    "nodes/services/drains.py": "LOCK_KEY",
    "nodes/services/gpus.py": "_LOCK",
    "nodes/services/charts.py": "_LOAD_SPAN _LOAD_STEP",
    "nodes/services/certificates.py": "_LOCK",
    "nodes/services/tickets.py": "_LOCK",
    # Formats of ours, part of what is stored or sent.
    "gateway/models.py": "TAIL_CHARS",
    "runner/ledger/database.py": "SCHEMA_VERSION",
    "wire/credentials.py": "_CRC_LENGTH",
    "wire/ids.py": "_VERSION",
    "wire/frames.py": "OPEN BODY CANCEL CREDIT HEAD DATA END REPLY FLAG_FIN",
    "wire/optoken/op_token.py": "TOKEN_VERSION",
    # Formats, numbers and defaults of others: files, Linux, libraries.
    "controlplane/gateway_server/ws_protocol.py": "_BINARY _SHORT_BYTES",
    "controlplane/launcher/postgres.py": "OLDEST_SERVER _READY_LINE",
    "controlplane/launcher/processes.py": "_PR_SET_PDEATHSIG",
    "controlplane/operate/status.py": "WELL ATTENTION NOT_RUNNING",
    "controlplane/operate/upgrade.py": "_ROWS_PER_S",
    "controlplane/operate/postgres_tools.py": "_HEAD_BYTES _SINCE",
    "controlplane/launcher/demo.py": (
        "_ALIGNMENT _VERSION _F32 _F16 _Q8_0 _STRING _ARRAY _BLOCK _BLOCK_BYTES _MOSTLY_F16 _LOOK_S"
    ),
    # The scene of the demo, which bounds nothing.
    "controlplane/demo/fleet.py": "SEED GIB REQUESTS DAYS _PEAK",
    "controlplane/demo/nodes.py": "_LOAD_S _SLOW_LOAD_S _SHORT_S _RETRY_S _ECHO_CHARS _TOGETHER",
    "controlplane/demo/traffic.py": "_LOOK_S",
    "controlplane/demo/scale.py": "_FRESH_S _BATCH",
    "controlplane/demo/scene.py": "_DRAIN_S _SETTLE_S",
    "runner/connection.py": "_FINAL_TEXT _FINAL_BINARY _MASKED _SIZES_OF_2 _SIZES_OF_8",
    "runner/definitions/fields.py": "EXLLAMA_PAGE_TOKENS MAX_INTEGER",
    "runner/engines/children/__init__.py": "PR_SET_PDEATHSIG",
    "runner/engines/children/subreaper.py": "_PR_SET_CHILD_SUBREAPER _CANNOT_RUN",
    "runner/engines/children/whisper.py": "RATE",
    "runner/engines/comfy.py": "MIN_SIDE MAX_SIDE SIDE_STEP",
    "runner/engines/llama.py": "BATCH_TOKENS",
    "wire/memory.py": "BATCH_TOKENS PAGE_TOKENS _MIB",
    "runner/fit/gguf.py": "_STRING _ARRAY",
    "runner/telemetry/gpus.py": "_INSUFFICIENT_SIZE _NOT_AVAILABLE",
    "runner/tiny/train.py": "END_OF_TEXT END_OF_TURN",
    # Arithmetic.
    "gateway/services/catalogue.py": "_MIB",
    "nodes/links/keeper.py": "_MIB",
    "runner/ledger/ledger.py": "HOUR_S DAY_S",
    "runner/library/hub.py": "MB",
    "runner/serving/costs.py": "MICROS",
    "wire/optoken/documents.py": "DAY_S",
    # Verifiers that are one file each and import nothing of ours (ADR 0009).
    "wire/auditlog.py": "USAGE_STATUS _SEARCHED_SEQS _MAX_FINDINGS _P _L",
    "wire/optoken/approval.py": "MAX_STATEMENT_BYTES MAX_POLICY_BYTES MAX_DEPTH MAX_INTEGER MAX_TARGETS MAX_PROOFS "
    "MAX_CLASSES MAX_FACTORS MAX_APPROVERS MAX_KEYS_EACH MAX_TEXT_CHARS CLOCK_SKEW_S _USER_PRESENT _USER_VERIFIED "
    "_BACKUP_ELIGIBLE _BACKED_UP _FIELD_PRIME _ORDER_8",
    # The clock's own state, a key, shares of a progress bar, and what scripted answers say.
    "wire/clock.py": "_stood_s",
    "runner/engines/supervisor.py": "_LOOP",
    "runner/engines/vllm_command.py": "_WEIGHTS_BEGIN _WEIGHTS_END _GRAPHS_BEGIN _GRAPHS_END",
    "conformance/engine/answers.py": "CREATED",
    "conformance/engine/script.py": "CONTEXT_TOKENS ASKED_TOKENS FITTING_TOKENS ANSWER_TOKENS PROMPT_TOKENS CACHED_TOKENS",
    "conformance/rows/modalities.py": "_RATE",
    "conformance/rows/models.py": "_NEAR_TOKENS _NEAR_SHARE",
}
"""Numbers of modules that are no bounds of ours, by what they are. Every bound is a field of a module of ``LIMITS``."""

PROCESS_EDGES: dict[str, str] = {
    "controlplane/gateway_server/server.py::GatewayApp._live": "the server is told that it cannot start, and exits",
    "controlplane/serve_worker.py::DueHere._carry_out": "a task that fails must not end the thread that carries out the others",
    "controlplane/tasks.py::sweep": "a look that fails must not keep the others from being taken",
    "controlplane/serve_control.py::Reconciler._run": "one operation that cannot be looked at must not stop the others",
    "gateway/tokenizers.py::serve": "the process that asked is told; a library it does not know must not end the counting",
    "gateway/views/endpoints.py::make_endpoint.application": "the client gets a 500, the log a traceback; a server would cut",
    "gateway/views/endpoints.py::Inference.serve": "as above; a stream that had begun is reset instead",
    "controlplane/operate/doctor.py::examine.make": "a check that fails is a finding; the others say what they see",
    "controlplane/launcher/processes.py::preload": "the children that are then executed say what is wrong",
    "controlplane/launcher/processes.py::_run_program": "as at the bottom of a program: the child logs it and ends",
    "core/outbox.py::_Rest.__await__": "throws it into the coroutine it stands for, which raises it again",
}
"""Where a broad exception may end: ``path::function`` and why nothing above could do better."""

FORBIDDEN_MODULE_NAMES = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}

STANDALONE = ("controlplane/launcher/", "controlplane/env.py", "muster", "tools/")
"""Runs before anything is installed: standard library, and the modules of ours that hold to the same."""
AFTER_INSTALLING = {
    ("controlplane/launcher/ports.py", "psutil"), ("controlplane/launcher/processes.py", "psutil"),
    ("controlplane/env.py", "core.valkey"), ("controlplane/launcher/up.py", "controlplane.tls"),
}  # fmt: skip
"""What is loaded once the packages are there: modules of the launcher by a command, ``core.valkey`` by the settings."""
STANDALONE_OURS = (
    "controlplane.launcher", "tools", "controlplane.env", "wire.clock", "wire.limits", "core.issuer", "core.limits",
    "wire.credentials",
    "wire.ids", "wire.variables", "wire.COMMAND", "wire.IS_CHECKOUT",
)  # fmt: skip

PURE = re.compile(
    r"(wire(/.*)?|\w+/states|nodes/(reports|session)|gateway/values|gateway/routing|gateway/dialects|governance/thresholds|runner/session)"
    r"(\.py|/__init__\.py)$"
)

TEXT_SUFFIXES = {
    ".cfg", ".conf", ".css", ".html", ".js", ".json", ".lua", ".md", ".py", ".sh", ".sql", ".svg", ".toml", ".txt", ".yaml",
    ".yml", "",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Function:
    """One function of the tree and where it stands."""

    path: str
    qualname: str
    node: ast.FunctionDef | ast.AsyncFunctionDef


@cache
def tree_files() -> tuple[str, ...]:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, capture_output=True, check=False, text=True)
    if listed.returncode != 0:  # A source archive without git.
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        hidden = {".venv", ".git", ".muster", "__pycache__", "node_modules", "staticfiles"}
        return tuple(sorted(str(path) for path in found if not hidden & set(path.parts)))
    return tuple(sorted(name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()))


def shipped_modules(*, migrations: bool = False) -> list[str]:
    names = [name for name in tree_files() if name.endswith(".py") and name.split("/")[0] in {*PACKAGES, "sdk"}]
    if not migrations:
        names = [name for name in names if "/migrations/" not in name]
    return [*names, *(name for name in ("manage.py", "muster") if (ROOT / name).is_file())]


@cache
def parse(name: str) -> ast.Module:
    """Return the syntax tree of a file, which stays as text when it is not Python."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return ast.parse(text if name.endswith(".py") or "python" in text.partition("\n")[0] else "", name)


@cache
def list_functions(name: str) -> tuple[Function, ...]:
    def visit(statements: list[ast.stmt], scope: tuple[str, ...]) -> Iterator[Function]:
        for child in statements:
            inner = (*scope, child.name) if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield Function(name, ".".join(inner), child)
            blocks = [child, *getattr(child, "handlers", ()), *getattr(child, "cases", ())]
            for field in ("body", "orelse", "finalbody"):
                for block in blocks:
                    yield from visit(getattr(block, field, []), inner)

    return tuple(visit(parse(name).body, ()))


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            # ``from wire import clock`` names a module of a package at the top.
            inner = [f"{node.module}.{alias.name}" for alias in node.names] if node.module in PACKAGES else [node.module]
            yield from ((node.lineno, name) for name in inner)


def text_files() -> list[str]:
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
        f"{name}:{line} {module}" for name in shipped_modules() if name.startswith(STANDALONE) for line,
        module in imported_names(parse(name)) if module.split(".")[0] not in sys.stdlib_module_names and not module.startswith(
        STANDALONE_OURS) and (name, module) not in AFTER_INSTALLING
    ]  # fmt: skip
    assert not outside, outside
    bare = [sys.executable, "-S", "-c", "import controlplane.launcher.cli, tools.develop"]
    subprocess.run(bare, cwd=ROOT, env={"PYTHONDONTWRITEBYTECODE": "1"}, timeout=30, check=True)


def test_every_governed_operation_names_what_carries_it_out() -> None:
    from django.conf import settings

    from governance.registry import OperationKind, find_kind

    needed = [name for name in (*vars(OperationKind), *OperationKind.__annotations__) if not name.startswith("_")]
    for name in settings.OPERATIONS:
        kind = find_kind(name)
        assert (kind.name, [each for each in needed if not hasattr(kind, each)]) == (name, [])


def test_migrations_import_nothing_of_the_apps() -> None:
    ours = {"controlplane", "core", "gateway", "governance", "nodes", "runner"}
    found = [
        f"{name}:{line} {module}" for name in shipped_modules(migrations=True) if "/migrations/" in name for line,
        module in imported_names(parse(name)) if module.split(".")[0] in ours
    ]  # fmt: skip
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
        for f in list_functions(name)
        if f.node.end_lineno is not None and f.node.end_lineno - f.node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not long, long


def test_modules_stay_small() -> None:
    counts = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in shipped_modules()}
    # The limits are a list: each bound is a line or two of it, and none is written anywhere else.
    assert not {name: count for name, count in counts.items() if count > MAX_MODULE_LINES and name not in LIMITS}


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    if isinstance(node, ast.BinOp):
        return _is_number(node.left) and _is_number(node.right)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).rpartition(".")[2] == "timedelta"
    return isinstance(node, ast.Constant) and type(node.value) in {int, float}


def _module_numbers(name: str) -> Iterator[str]:
    """Yield the names that a module gives to numbers, those of ``A, B = 1, 2`` too."""
    for node in parse(name).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            else:
                pairs = [(target, node.value)]
            yield from (ast.unparse(named) for named, value in pairs if _is_number(value))


def test_numbers_of_modules_are_fields_of_the_limits() -> None:
    modules = [*shipped_modules(), *(name for name in tree_files() if name.startswith("conformance/") and name.endswith(".py"))]
    found = {(name, number) for name in modules if name not in LIMITS for number in _module_numbers(name)}
    known = {(name, number) for name, numbers in NUMBERS.items() for number in numbers.split()}
    assert not found - known, "make it a field of the limits, or name it in NUMBERS when it is no bound"
    assert not known - found, "no longer there: take it off NUMBERS"


def test_no_test_patches_a_constant() -> None:
    # ``monkeypatch.setattr`` of an object and a name, or of a dotted name.
    constant = re.compile(r"""\bsetattr\(\s*(?:[\w.]+,\s*)?["'](?:\w+\.)*(_*[A-Z][A-Z0-9_]*)["']""")
    modules = [name for name in tree_files() if name.startswith("tests/") and name.endswith(".py")]
    found = [f"{name} {patched}" for name in modules for patched in constant.findall((ROOT / name).read_text(encoding="utf-8"))]
    assert not found, f"give it to what reads it, or change the limits with tests/fakes/limits.py: {found}"


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
        functions = sorted(list_functions(name), key=lambda f: -f.node.lineno)
        for node in ast.walk(parse(name)):
            if _swallows(node):
                line = getattr(node, "lineno", 0)
                owners = (f.qualname for f in functions if f.node.lineno <= line <= (f.node.end_lineno or 0))
                yield f"{name}::{next(owners, '<module>')}"


REPLACED_WORDS = frozenset(
    [
        "bell",
        "boxes",
        "box",
        "clerk",
        "clerks",
        "courier",
        "couriers",
        "door",
        "doors",
        "hindrance",
        "hindrances",
        "keeping",
        "lane",
        "lanes",
        "obstacle",
        "obstacles",
        "outlook",
        "outlooks",
        "passage",
        "patience",
        "phrasing",
        "refusing",
        "rewriting",
        "stories",
        "story",
        "tallies",
        "tally",
        "warden",
        "wardens",
    ]
)
"""Words that the glossary replaces, in identifiers and in names of modules."""
ESTABLISHED = {"box_key", "call_box", "hindrances"}
"""A column, a Celery task and a member of the REST API: a new name would break the release before."""


def identifiers_of(name: str) -> set[str]:
    found = set(Path(name).with_suffix("").parts)
    for node in ast.walk(parse(name)):
        match node:
            case ast.ClassDef(defined) | ast.FunctionDef(defined) | ast.AsyncFunctionDef(defined) | ast.Name(defined):
                found.add(defined)
            case ast.arg(defined) | ast.keyword(str(defined)) | ast.Attribute(_, defined):
                found.add(defined)
    return found


def test_identifiers_use_the_words_of_the_glossary() -> None:
    found = {
        (name, identifier)
        for name in shipped_modules()
        for identifier in identifiers_of(name) - ESTABLISHED
        if REPLACED_WORDS & set(re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", identifier).lower()))
    }
    assert not found, "the glossary has another word for it"


def test_broad_exceptions_end_only_at_process_edges() -> None:
    places = set(_swallowing_places())
    assert not places - set(PROCESS_EDGES), "name the exception, or add the place and its reason to PROCESS_EDGES"
    assert not set(PROCESS_EDGES) - places, "no longer there: take it off PROCESS_EDGES"


def test_every_module_says_what_it_is() -> None:
    modules = [name for name in shipped_modules() if (ROOT / name).stat().st_size]
    assert not [name for name in modules if not ast.get_docstring(parse(name)) and name.endswith(".py")]


def test_no_path_of_a_developers_machine_is_in_the_tree() -> None:
    roots = "|".join(("wo" + "rk", "tm" + "p/w", "ro" + "ot", "ho" + r"me/\w+"))
    private = re.compile(rf"(?<![\w./>}}-])/({roots})/|\.\./sha" + r"red\b")
    found = [
        f"{name}:{number} {line.strip()[:100]}" for name in text_files() for number,
        line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1) if private.search(line)
    ]  # fmt: skip
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
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"]["packages"] == sorted((*PACKAGES, "conformance", "sdk/muster", "templates"))
    folders = {name for name in targets["sdist"]["include"] if "." not in name} - {"/LICENSE"}
    assert folders == {f"/{name.split('/')[0]}" for name in targets["wheel"]["packages"]}
    top = {name.split("/")[0] for name in tree_files() if name.endswith("/__init__.py")}
    assert top - set(PACKAGES) == {"benchmarks", "conformance", "sdk", "tests", "tools"}, (
        "a package at the top either ships or is named here"
    )


MODULES = (
    controlplane.authentication, gateway.request.identity, governance.admin_tokens, core.throttle,
    nodes.api, nodes.consumers, nodes.services.credentials, wire.credentials,
)  # fmt: skip
RAW = {"raw", "extra", "RawSQL", "cursor", "execute", "executemany", "connection", "connections"}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_no_module_that_checks_credentials_writes_sql(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not used & RAW


def test_the_release_stands_in_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert (project["project"]["dynamic"], project["tool"]["hatch"]["version"]["path"]) == (["version"], "wire/__init__.py")
    found = [name for name in shipped_modules() if name != "wire/__init__.py" and f'"{RELEASE}"' in (ROOT / name).read_text()]
    assert not found, found
    # What is read before any program of ours runs repeats it: the chart, tags of images and the wheel in the pages.
    repeated = re.compile(
        r"\bmuster-(?:server|runner[\w-]*):(\d[\w.]*)|\bmuster-(\d[\w.]*)-py3|^(?:appVersion|version): \"?(\d[\w.]*)",
        re.MULTILINE,
    )
    told = {
        (name, *filter(None, match.groups()))
        for name in text_files()
        if name.startswith(("docker/", "deploy/", "docs/", "README"))
        for match in repeated.finditer((ROOT / name).read_text(encoding="utf-8"))
    }
    assert {name for name, _ in told} >= {"docs/install.md", "deploy/helm/muster/Chart.yaml"}
    assert not [pair for pair in told if pair[1] != RELEASE]
