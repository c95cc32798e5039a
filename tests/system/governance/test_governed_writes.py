"""There is no way round approval: what is governed is written in a few modules, and each way to do it directly asks the guard.

Read from the source, so that a new way cannot be forgotten. A module counts as a writer of a table when it names the table (its
class, a related manager, a look-up by name, or SQL) and writes rows of anything that cannot be told to be another table.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest
from django.apps import apps
from django.conf import settings

from gateway.services.limits import CAPS

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("controlplane", "core", "gateway", "governance", "nodes")
WRITES = {
    f"{prefix}{name}"
    for prefix in ("", "a")
    for name in ("create", "save", "update", "delete", "get_or_create", "update_or_create", "bulk_create", "bulk_update")
} | {"save_base", "_raw_delete", "raw", "force_insert"}
SQL_WRITE = r"(?:insert\s+into|update|delete\s+from|truncate(?:\s+table)?|merge\s+into|copy)\s+(?:only\s+)?\"?"

SQL_WORD = re.compile(r"insert|update|delete|truncate|merge|copy", re.IGNORECASE)
SQL_WRITE_OF_ANY = re.compile(
    r"\b(?:INSERT\s+INTO|UPDATE|DELETE\s+FROM|TRUNCATE|MERGE\s+INTO|COPY)\s+(?:ONLY\s+|TABLE\s+)?\"?(?:\Z|\{|%)"
)
"""SQL whose table is put in later, as capitals write it."""

OPERATIONS = "governance/operations"
WRITERS: dict[str, set[str]] = {
    "governance.AdminToken": {"governance/admin_tokens.py"},
    "governance.ApproverKey": {"governance/keys.py", f"{OPERATIONS}/decisions.py"},
    "governance.Decision": {f"{OPERATIONS}/approvals.py", f"{OPERATIONS}/decisions.py"},
    "governance.Freeze": {f"{OPERATIONS}/policies.py"},
    "governance.Operation": {f"{OPERATIONS}/{name}.py" for name in ("approvals", "proposals", "runs")},
    "governance.OperationRun": {f"{OPERATIONS}/{name}.py" for name in ("approvals", "runs")},
    "governance.PolicyVersion": {f"{OPERATIONS}/approvals.py", f"{OPERATIONS}/policies.py"},
    "governance.WebhookEndpoint": {"governance/notices.py"},
    "gateway.ApiKey": {"gateway/request/models.py", "gateway/services/keys.py"},
    "gateway.Model": {"gateway/services/compatibility.py", "gateway/services/models.py"},
    "gateway.Tenant": {"gateway/services/tenants.py"},
}  # fmt: skip
"""Table → the modules that may write it."""

LIMITS: dict[str, set[str]] = {
    "gateway.ApiKey": {"requests_per_minute", "priority", "budgets"},
    "gateway.Tenant": {"requests_per_minute", "budgets", "weight"},
    "gateway.Model": {"max_tokens", "max_prompt_chars", "max_queue"},
}
"""Table → the columns that say how much somebody may have."""
LIMIT_WRITERS: dict[str, set[str]] = {
    "gateway.ApiKey": {"gateway/services/keys.py"},
    "gateway.Tenant": {"gateway/services/tenants.py"},
    "gateway.Model": {"gateway/services/models.py"},
}
"""Table → the modules that may write those columns."""

COUNTERPARTS: dict[str, set[str]] = {
    "limit-raise": {"gateway/services/keys.py::create_api_key", "gateway/services/keys.py::change_key_limits",
        "gateway/services/keys.py::raise_key_limit", "gateway/services/tenants.py::create_tenant",
        "gateway/services/tenants.py::change_tenant_limit",
        "gateway/services/keys.py::change_key_budgets", "gateway/services/tenants.py::change_tenant_budgets",
        "gateway/services/tenants.py::change_tenant_weight",
        "gateway/services/models.py::allow_model",
        "gateway/services/models.py::change_model_caps", "gateway/services/models.py::raise_model_caps"},
    "admin-token-mint": {"governance/admin_tokens.py::create_admin_token"},
    "node-drain": {"nodes/services/drains.py::drain_node"}, "node-evict": {"nodes/services/drains.py::drain_node"},
    "model-load": set(), "model-unload": set(), "cache-flush": set(), "settings-reload": set(), "policy-change": set(),
    "unfreeze": set(), "break-glass-review": set(),
}  # fmt: skip
"""Operation → the services that do the same directly, each of which asks the guard. Empty: only carrying out a run does it."""
ASKED_BY_ITS_CALLERS = {"governance/admin_tokens.py::_mint"}
"""``create_admin_token`` asks; ``claim_admin_token`` looks for the approved run itself."""


CALLERS: dict[str, set[str]] = {
    "carry_out": {f"{OPERATIONS}/runs.py"},
    "adopt_policy": {"governance/operations/kinds.py"}, "lift_freeze": {"governance/operations/kinds.py"},
    "raise_key_limit": {"gateway/operations.py"}, "raise_model_caps": {"gateway/operations.py"},
}  # fmt: skip
"""What does a governed thing without asking the guard, and the modules that may call it."""


@cache
def sources() -> dict[str, str]:
    paths = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "migrations" not in path.parts)
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(paths)}


@cache
def related_names() -> dict[str, str]:
    """Return the related managers that lead to governed rows, such as ``runs``, and the table behind each."""
    found: dict[str, str] = {}
    for table in WRITERS:
        for field in apps.get_model(table)._meta.get_fields():
            name = getattr(getattr(field, "remote_field", None), "related_name", None)
            if getattr(field, "many_to_one", False) and name and name != "+":
                found[name] = table
    return found


def chain_names(node: ast.AST) -> Iterator[str]:
    """Return the names of ``a.b(…).c`` from the end to the start."""
    while True:
        match node:
            case ast.Attribute(value, attr):
                yield attr
                node = value
            case ast.Call(func, _, _):
                node = func
            case ast.Subscript(value, _) | ast.Await(value):
                node = value
            case ast.Name(name):
                yield name
                return
            case _:
                return


@cache
def classes() -> dict[str, str]:
    return {model.__name__: model._meta.label for model in apps.get_models()}


class Scope:
    """What the variables of one function hold, as far as annotations and assignments say: a table for each."""

    def __init__(self, function: ast.AST, returned: dict[str, str]) -> None:
        self._tables: dict[str, str] = {}
        self._returned = returned
        for node in ast.walk(function):
            if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
                name = node.arg if isinstance(node, ast.arg) else getattr(node.target, "id", "")
                self._note(name, [n.id for n in ast.walk(node.annotation) if isinstance(n, ast.Name)])
        for _ in range(3):  # what is derived from what is derived
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and len(node.targets) == 1:
                    self._derive(node.targets[0], node.value)
                elif isinstance(node, ast.For):
                    self._derive(node.target, node.iter)

    def table_of(self, node: ast.AST) -> str | None:
        """Return the table whose rows an expression gives; None when nothing says so."""
        names = list(chain_names(node))
        for name in names[:-1]:
            if name in related_names():
                return related_names()[name]
        root = names[-1] if names else ""
        return classes().get(root) or self._tables.get(root) or self._returned.get(root)

    def _derive(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for each, its_value in zip(target.elts, value.elts, strict=True):
                self._derive(each, its_value)
            return
        found = self.table_of(value)
        if isinstance(target, ast.Tuple) and list(chain_names(value))[:1] in (["get_or_create"], ["update_or_create"]):
            target = target.elts[0]
        if isinstance(target, ast.Name) and found is not None:
            self._tables.setdefault(target.id, found)

    def _note(self, name: str, words: list[str]) -> None:
        tables = [classes()[word] for word in words if word in classes()]
        if tables:
            self._tables[name] = tables[0]


def returned_tables(tree: ast.Module, functions: Sequence[ast.FunctionDef | ast.AsyncFunctionDef]) -> dict[str, str]:
    """Return the functions of a module, its own and imported ones of ours, that say they return rows, and of which table."""
    found: dict[str, str] = {}
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module)
    homes = ((f"{node.module}".replace(".", "/") + ".py", node.names) for node in imports)
    imported = [functions_of(home).get(alias.name) for home, names in homes if home in sources() for alias in names]
    for function in [*functions, *(each for each in imported if each is not None)]:
        words = {node.id for node in ast.walk(function.returns) if isinstance(node, ast.Name)} if function.returns else set()
        tables = {classes()[word] for word in words if word in classes()}
        if len(tables) == 1:
            found[function.name] = tables.pop()
    return found


def list_row_writes(tree: ast.Module) -> Iterator[tuple[str | None, ast.Call]]:
    """Return every call that writes rows with its table; None where the source does not tell."""
    if not any(is_row_write(node) for node in ast.walk(tree)):
        return
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    returned = returned_tables(tree, functions)
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for scope_of in [*functions, tree]:
        calls = [node for node in ast.walk(scope_of) if is_row_write(node) and (scope_of is not tree or id(node) not in inside)]
        scope = Scope(scope_of, returned) if calls else None
        for call in calls:
            assert scope is not None
            match call.func:
                case ast.Name(name):
                    yield classes()[name], call
                case ast.Attribute(value, _):
                    yield scope.table_of(value), call


def is_row_write(node: ast.AST) -> TypeGuard[ast.Call]:
    match node:
        case ast.Call(ast.Name(name)):
            return name in classes()
        case ast.Call(ast.Attribute(ast.Name("self"), "create")):
            return False  # a method of its own class; managers of our own are forbidden below
        case ast.Call(ast.Attribute(ast.Call(ast.Name("super")), _)):
            return False  # a row that stores itself
        case ast.Call(ast.Attribute(_, name)):
            # With positional arguments, update() is that of a dict or a hash.
            return name in WRITES and not (name == "update" and node.args)
    return False


def named_tables(tree: ast.Module) -> set[str]:
    """Return the governed tables that a module names as a class, by text, or by a related manager."""
    labels = {table.lower(): table for table in WRITERS} | {table.rpartition(".")[2].lower(): table for table in WRITERS}
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(name) | ast.Attribute(_, name) | ast.alias(name) if classes().get(name) in WRITERS:
                found.add(classes()[name])
            case ast.Attribute(_, name) if name in related_names():
                found.add(related_names()[name])
            case ast.Constant(str(text)) if text.lower() in labels:
                found.add(labels[text.lower()])
    return found


def find_writes(text: str) -> set[str]:
    tree = ast.parse(text)
    written = {table for table, _ in list_row_writes(tree)}
    texts = list_texts(tree)
    found = {table for table in WRITERS if table in written or is_in_sql(texts, apps.get_model(table)._meta.db_table)}
    return found | (named_tables(tree) if None in written or any(map(SQL_WRITE_OF_ANY.search, texts)) else set())


def list_texts(tree: ast.Module) -> list[str]:
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text for text in texts if SQL_WORD.search(text)]


def is_in_sql(texts: Sequence[str], db_table: str) -> bool:
    pattern = re.compile(SQL_WRITE + re.escape(db_table) + r"\b", re.IGNORECASE)
    return any(pattern.search(text) for text in texts)


DEMO = "controlplane/demo/"
"""Writes the history of a fleet that nobody has, past the services: only into an installation that nobody uses, and by the
command of who may write to its database anyway."""


def test_nothing_but_the_command_of_the_demo_knows_the_demo() -> None:
    importers = {path for path, text in sources().items() if "controlplane.demo" in text and not path.startswith(DEMO)}
    assert importers == {"controlplane/commands/demo.py"}
    assert "require_unused()" in sources()["controlplane/commands/demo.py"]


@cache
def all_writers() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {table: set() for table in WRITERS}
    for path, text in sources().items():
        if path.startswith(DEMO):
            continue
        for table in find_writes(text):
            found[table].add(path)
    return found


def sets_limits(text: str, limits: Collection[str] = frozenset().union(*LIMITS.values())) -> bool:
    """Return whether a module writes limits of rows that have some, or values that the source does not name."""
    tree = ast.parse(text)
    for table, call in list_row_writes(tree):
        names = named_values(call)
        if (table in LIMITS or table is None) and (names is None or not names.isdisjoint(limits)):
            return True
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(_, name, ast.Store()) if name in limits:
                return True
            case ast.Call(ast.Name("setattr")):
                return True
    texts = list_texts(tree)
    return any(is_in_sql(texts, apps.get_model(table)._meta.db_table) for table in LIMITS)


def named_values(call: ast.Call) -> set[str] | None:
    """Return the names of the values that a call writes, ``defaults`` among them; None when the source does not name them."""
    found: set[str] = set()
    for keyword in call.keywords:
        if keyword.arg in {"defaults", "create_defaults"}:
            keys = keyword.value.keys if isinstance(keyword.value, ast.Dict) else [None]
            names = [key.value if isinstance(key, ast.Constant) else None for key in keys]
        else:
            names = [keyword.arg]
        if None in names:
            return None
        found |= {str(name) for name in names}
    return found


@cache
def functions_of(path: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(ast.parse(sources()[path])) if isinstance(node, ast.FunctionDef)}


@cache
def imported_from(path: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(sources()[path])):
        if isinstance(node, ast.ImportFrom) and node.module:
            home = f"{node.module.replace('.', '/')}.py"
            found |= {alias.asname or alias.name: home for alias in node.names if home in sources()}
    return found


def asks_guard(path: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()) -> bool:
    """Return whether a function calls ``require_approval``, itself or through functions of ours."""
    function = functions_of(path).get(name)
    if function is None or (path, name) in seen:
        return False
    called = {node.func.id for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if "require_approval" in called:
        return True
    homes = {each: path if each in functions_of(path) else imported_from(path).get(each) for each in called}
    return any(home and asks_guard(home, each, seen | {(path, name)}) for each, home in homes.items())


@pytest.mark.parametrize("table", sorted(WRITERS))
def test_a_governed_table_is_written_by_its_services_alone(table: str) -> None:
    assert all_writers()[table] == WRITERS[table]


@pytest.mark.parametrize("table", sorted(LIMITS))
def test_limits_are_written_by_their_services_alone(table: str) -> None:
    assert {path for path in all_writers()[table] if sets_limits(sources()[path], LIMITS[table])} == LIMIT_WRITERS[table]


@pytest.mark.parametrize("table", sorted(LIMITS))
def test_every_limit_is_a_column(table: str) -> None:
    assert LIMITS[table] <= {field.name for field in apps.get_model(table)._meta.get_fields()}


def test_limits_of_models_are_those_that_the_operation_knows() -> None:
    assert set(CAPS) == LIMITS["gateway.Model"]


def test_there_are_no_managers_of_our_own_through_which_rows_could_be_written_unseen() -> None:
    bases = re.compile(r"^class \w+\([^)]*(?:Manager|QuerySet)\b", re.MULTILINE)
    assert not [path for path, text in sources().items() if bases.search(text)]


def test_every_operation_says_what_does_the_same_directly() -> None:
    assert set(COUNTERPARTS) == set(settings.OPERATIONS)


@pytest.mark.parametrize(
    ("operation", "service"), sorted((operation, service) for operation, found in COUNTERPARTS.items() for service in found)
)
def test_what_does_the_same_directly_asks_the_guard(operation: str, service: str) -> None:
    path, _, name = service.partition("::")
    assert asks_guard(path, name), f"{service} does what {operation} does and must call require_approval"


def test_a_new_function_that_writes_limits_or_tokens_beside_the_known_ones_is_a_counterpart_too() -> None:
    listed = {service for found in COUNTERPARTS.values() for service in found} | ASKED_BY_ITS_CALLERS
    unlisted = []
    for path in (*frozenset().union(*LIMIT_WRITERS.values()), "governance/admin_tokens.py"):
        for name, function in functions_of(path).items():
            text = ast.unparse(ast.Module([function], []))
            if (sets_limits(text) or "AdminToken.objects.create" in text) and f"{path}::{name}" not in listed:
                unlisted.append(f"{path}::{name}")
    assert not unlisted


@pytest.mark.parametrize("name", sorted(CALLERS))
def test_what_carries_out_is_called_from_where_the_approval_was_verified_alone(name: str) -> None:
    calls = re.compile(rf"(?<!def )\b{name}\(")
    assert {path for path, text in sources().items() if calls.search(text)} == CALLERS[name]


LEAKS = {
    "create": ("governance.AdminToken", "def f():\n    AdminToken.objects.create(name='x')"),
    "constructor": ("governance.Operation", "def f():\n    Operation(statement=b'')"),
    "update of a query": ("governance.OperationRun", "def f():\n    OperationRun.objects.filter(pk=1).update(state='queued')"),
    "update of a variable": ("governance.Freeze",
        "def f():\n    rows = Freeze.objects.all()\n    few = rows[:2]\n    few.update(lifted_at=1)"),
    "save of an argument": ("governance.Operation", "def f(one: Operation) -> None:\n    one.state = 'new'\n    one.save()"),
    "save in a loop": ("governance.Decision", "def f():\n    for one in Decision.objects.all():\n        one.save()"),
    "bulk_update": ("governance.PolicyVersion", "def f(rows):\n    PolicyVersion.objects.bulk_update(rows, ['state'])"),
    "delete": ("governance.Decision", "def f():\n    Decision.objects.all().delete()"),
    "get_or_create": ("governance.OperationRun", "def f():\n    OperationRun.objects.get_or_create(pk=1)"),
    "asynchronous": ("governance.ApproverKey", "async def f():\n    await ApproverKey.objects.acreate(label='x')"),
    "related manager": ("governance.OperationRun", "def f(operation):\n    operation.runs.update(state='queued')"),
    "create by a related manager": ("governance.Decision", "def f(one):\n    one.decisions.create(is_approval=True)"),
    "by its name": ("governance.AdminToken", "def f():\n    get_model('governance', 'AdminToken').objects.create(name=1)"),
    "by its label": ("governance.Operation", "def f():\n    m = get_model('governance.operation')\n    m.objects.update(a=1)"),
    "by its module": ("governance.Freeze", "import governance.models as m\ndef f():\n    m.Freeze.objects.create(by='x')"),
    "SQL": ("governance.Operation", "def f(cursor):\n    cursor.execute('UPDATE governance_operation SET state = 1')"),
    "SQL of several lines": ("gateway.ApiKey", "SQL = 'INSERT INTO\\n  gateway_apikey (name) VALUES (1)'"),
    "SQL around a name": ("governance.Operation",
        "def f(cursor):\n    cursor.execute(f'UPDATE {Operation._meta.db_table} SET state = 1')"),
    "SQL before a name": ("gateway.Tenant", "def f(cursor):\n    cursor.execute('DELETE FROM ' + Tenant._meta.db_table)"),
    "SQL with a gap": ("gateway.ApiKey", "def f(c):\n    c.execute('INSERT INTO {} VALUES (1)'.format(ApiKey._meta.db_table))"),
    "defaults": ("gateway.Model", "def f():\n    Model.objects.update_or_create(name='m', defaults={'max_queue': 9})"),
    "model by its label": ("gateway.Model", "def f():\n    m = get_model('gateway.Model')\n    m.objects.update(max_queue=9)"),
    "at import": ("governance.WebhookEndpoint", "WebhookEndpoint.objects.update(url='x')"),
}  # fmt: skip
"""Ways round, each in a made-up module. A net that catches nothing would prove nothing."""


@pytest.mark.parametrize("way", sorted(LEAKS))
def test_a_way_round_would_be_found(way: str) -> None:
    table, text = LEAKS[way]
    assert table in find_writes(text)


@pytest.mark.parametrize(
    "text",
    ["def f(key: ApiKey) -> None:\n    key.requests_per_minute = 9\n    key.save()",
        "def f():\n    ApiKey.objects.filter(pk=1).update(priority='high')",
        "def f(values):\n    Tenant.objects.update(**values)",
        "def f(tenant, field):\n    setattr(tenant, field, 9)\n    tenant.save()",
        "def f(model: Model) -> None:\n    model.max_prompt_chars = None\n    model.save()",
        "def f():\n    Model.objects.filter(name='m').update(max_queue=9)",
        "def f():\n    Model.objects.update_or_create(name='m', defaults={'max_tokens': 9})",
        "def f(caps):\n    Model.objects.get_or_create(name='m', defaults={'allowed': True, **caps})",
        "def f(caps):\n    Model.objects.bulk_create([Model(name='m', **caps)])",
        "def f(cursor):\n    cursor.execute('UPDATE gateway_model SET max_tokens = 9')"],
    ids=["attribute", "update", "values", "setattr", "cap", "update of a cap", "defaults", "unnamed defaults", "constructor",
        "SQL"],
)  # fmt: skip
def test_a_new_writer_of_limits_would_be_found(text: str) -> None:
    assert sets_limits(text)


@pytest.mark.parametrize(
    "text",
    ["def f():\n    return Operation.objects.filter(state='pending').count()",
        "def f(one):\n    RequestRecord.objects.filter(pk=one.pk).update(state='x')\n    return one.runs.all()",
        "def f(hasher, operation: Operation) -> None:\n    hasher.update(operation.statement)"],
    ids=["reading", "another table", "a hash"],
)  # fmt: skip
def test_what_only_reads_is_no_writer(text: str) -> None:
    assert find_writes(text) == set()


@pytest.mark.parametrize("name", ["disallow_model", "change_model_details", "remember_models"])
def test_what_writes_other_columns_of_models_sets_no_limit(name: str) -> None:
    text = ast.unparse(ast.Module([functions_of("gateway/services/models.py")[name]], []))
    assert re.search(r"\.(save|bulk_create)\(", text)
    assert not sets_limits(text)


def test_a_service_without_the_guard_is_told_from_one_with_it() -> None:
    assert asks_guard("gateway/services/tenants.py", "change_tenant_limit")
    assert not asks_guard("gateway/services/tenants.py", "disable_tenant")
