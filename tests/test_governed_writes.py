"""There is no way round approval: what is governed is written in a few modules, and each way to do it directly asks the guard.

Read from the source, so that a new way cannot be forgotten. A module counts as a writer of a table when it names the table (its
class, a related manager, a look-up by name, or SQL) and writes rows of anything that cannot be told to be another table.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from django.apps import apps
from django.conf import settings

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("controlplane", "gateway", "governance", "nodes")
WRITES = {
    f"{prefix}{name}"
    for prefix in ("", "a")
    for name in ("create", "save", "update", "delete", "get_or_create", "update_or_create", "bulk_create", "bulk_update")
} | {"save_base", "_raw_delete", "raw", "force_insert"}
SQL_WRITE = r"(?:insert\s+into|update|delete\s+from|truncate(?:\s+table)?|merge\s+into|copy)\s+(?:only\s+)?\"?"

SQL_WRITE_OF_ANY = re.compile(
    r"\b(?:INSERT\s+INTO|UPDATE|DELETE\s+FROM|TRUNCATE|MERGE\s+INTO|COPY)\s+(?:ONLY\s+|TABLE\s+)?\"?(?:\Z|\{|%)"
)
"""SQL whose table is put in later, as capitals write it."""

SERVICES = "governance/services"
WRITERS: dict[str, set[str]] = {
    "governance.AdminToken": {f"{SERVICES}/admin_tokens.py"},
    "governance.ApproverKey": {f"{SERVICES}/approver_keys.py", f"{SERVICES}/decisions.py"},
    "governance.Decision": {f"{SERVICES}/decisions.py", f"{SERVICES}/transitions.py"},
    "governance.Freeze": {f"{SERVICES}/freezes.py"},
    "governance.Operation": {f"{SERVICES}/{name}.py" for name in ("dispatching", "lookup", "proposals", "sweeps")},
    "governance.OperationRun": {
        f"{SERVICES}/{name}.py" for name in ("decisions", "dispatching", "finishing", "runs", "transitions")
    },
    "governance.PolicyVersion": {f"{SERVICES}/policies.py", f"{SERVICES}/transitions.py"},
    "governance.WebhookEndpoint": {f"{SERVICES}/webhooks.py"},
    "nodes.NodeCommand": {f"nodes/commands/{name}.py" for name in ("delivery", "direct", "rows", "statuses")},
    "gateway.ApiKey": {"gateway/catalogue.py", "gateway/services/keys.py"},
    "gateway.Tenant": {"gateway/services/tenants.py"},
}
"""Table → the modules that may write it."""

LIMITS = {"requests_per_minute", "priority"}
LIMIT_WRITERS = {"gateway/services/keys.py", "gateway/services/tenants.py"}
"""The modules that may write those columns of keys and tenants."""

COUNTERPARTS: dict[str, set[str]] = {
    "limit-raise": {
        "gateway/services/keys.py::create_api_key",
        "gateway/services/keys.py::change_key_limits",
        "gateway/services/keys.py::raise_key_limit",
        "gateway/services/tenants.py::create_tenant",
        "gateway/services/tenants.py::change_tenant_limit",
    },
    "admin-token-mint": {f"{SERVICES}/admin_tokens.py::create_admin_token"},
    "node-drain": {"nodes/services/lifecycle.py::drain_node"},
    "node-evict": {"nodes/services/lifecycle.py::drain_node"},
    "model-load": set(),
    "model-unload": set(),
    "cache-flush": set(),
    "policy-change": set(),
    "unfreeze": set(),
    "break-glass-review": set(),
}
"""Operation → the services that do the same directly, each of which asks the guard. Empty: only carrying out a run does it."""
ASKED_BY_ITS_CALLERS = {f"{SERVICES}/admin_tokens.py::_mint"}
"""``create_admin_token`` asks; ``claim_admin_token`` looks for the approved run itself."""


CALLERS: dict[str, set[str]] = {
    "carry_out": {f"{SERVICES}/dispatching.py"},
    "put_command": {"nodes/operations/models_on_boxes.py"},
    "adopt_policy": {"governance/operations.py"},
    "lift_freeze": {"governance/operations.py"},
    "raise_key_limit": {"gateway/operations.py"},
}
"""What does a governed thing without asking the guard, and the modules that may call it."""


@cache
def sources() -> dict[str, str]:
    """Return the text of every module that is looked at, migrations left out."""
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
    """Return every model class of the project by name."""
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
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    returned = returned_tables(tree, functions)
    inside = {id(node) for function in functions for node in ast.walk(function)}
    for scope_of in [*functions, tree]:
        scope = Scope(scope_of, returned)
        for node in ast.walk(scope_of):
            if not isinstance(node, ast.Call) or (scope_of is tree and id(node) in inside):
                continue
            match node.func:
                case ast.Name(name) if name in classes():
                    yield classes()[name], node
                case ast.Attribute(ast.Name("self"), "create"):
                    pass  # a method of its own class; managers of our own are forbidden below
                case ast.Attribute(value, name) if name in WRITES and not (name == "update" and node.args):
                    # With positional arguments, update() is that of a dict or a hash.
                    yield scope.table_of(value), node


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
    """Return the governed tables that a module with this text may write."""
    tree = ast.parse(text)
    written = {table for table, _ in list_row_writes(tree)}
    found = {table for table in WRITERS if table in written or is_in_sql(tree, apps.get_model(table)._meta.db_table)}
    return found | (named_tables(tree) if None in written or writes_any_table(tree) else set())


def is_in_sql(tree: ast.Module, db_table: str) -> bool:
    """Return whether a text of the module is SQL that writes the table."""
    pattern = re.compile(SQL_WRITE + re.escape(db_table) + r"\b", re.IGNORECASE)
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return any(pattern.search(text) for text in texts)


def writes_any_table(tree: ast.Module) -> bool:
    """Return whether a text of the module is SQL that writes a table which the text does not name."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return any(SQL_WRITE_OF_ANY.search(text) for text in texts)


@cache
def all_writers() -> dict[str, set[str]]:
    """Return every table with the modules that write it."""
    found: dict[str, set[str]] = {table: set() for table in WRITERS}
    for path, text in sources().items():
        for table in find_writes(text):
            found[table].add(path)
    return found


def sets_limits(text: str) -> bool:
    """Return whether a module writes the limit of a key or tenant, or values that the source does not name."""
    tree = ast.parse(text)
    for table, call in list_row_writes(tree):
        names = {keyword.arg for keyword in call.keywords}
        if table in {"gateway.ApiKey", "gateway.Tenant", None} and (None in names or LIMITS & names):
            return True
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(_, name, ast.Store()) if name in LIMITS:
                return True
            case ast.Call(ast.Name("setattr")):
                return True
    return False


@cache
def functions_of(path: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a module by name."""
    return {node.name: node for node in ast.walk(ast.parse(sources()[path])) if isinstance(node, ast.FunctionDef)}


@cache
def imported_from(path: str) -> dict[str, str]:
    """Return the functions that a module imports from another of ours, and the module's path."""
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


def test_limits_are_written_by_their_services_alone() -> None:
    writers = all_writers()["gateway.ApiKey"] | all_writers()["gateway.Tenant"]
    assert {path for path in writers if sets_limits(sources()[path])} == LIMIT_WRITERS


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
    for path in (*LIMIT_WRITERS, f"{SERVICES}/admin_tokens.py"):
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
    "update of a variable": (
        "governance.Freeze", "def f():\n    rows = Freeze.objects.all()\n    few = rows[:2]\n    few.update(lifted_at=1)"
    ),
    "save of an argument": ("governance.Operation", "def f(one: Operation) -> None:\n    one.state = 'new'\n    one.save()"),
    "save in a loop": ("governance.Decision", "def f():\n    for one in Decision.objects.all():\n        one.save()"),
    "bulk_update": ("governance.PolicyVersion", "def f(rows):\n    PolicyVersion.objects.bulk_update(rows, ['state'])"),
    "delete": ("governance.Decision", "def f():\n    Decision.objects.all().delete()"),
    "get_or_create": ("nodes.NodeCommand", "def f():\n    NodeCommand.objects.get_or_create(pk=1)"),
    "asynchronous": ("governance.ApproverKey", "async def f():\n    await ApproverKey.objects.acreate(label='x')"),
    "related manager": ("governance.OperationRun", "def f(operation):\n    operation.runs.update(state='queued')"),
    "create by a related manager": ("governance.Decision", "def f(one):\n    one.decisions.create(is_approval=True)"),
    "by its name": ("governance.AdminToken", "def f():\n    get_model('governance', 'AdminToken').objects.create(name=1)"),
    "by its label": ("governance.Operation", "def f():\n    m = get_model('governance.operation')\n    m.objects.update(a=1)"),
    "by its module": ("governance.Freeze", "import governance.models as m\ndef f():\n    m.Freeze.objects.create(by='x')"),
    "SQL": ("governance.Operation", "def f(cursor):\n    cursor.execute('UPDATE governance_operation SET state = 1')"),
    "SQL of several lines": ("gateway.ApiKey", "SQL = 'INSERT INTO\\n  gateway_apikey (name) VALUES (1)'"),
    "SQL around a name": (
        "governance.Operation", "def f(cursor):\n    cursor.execute(f'UPDATE {Operation._meta.db_table} SET state = 1')"
    ),
    "SQL before a name": ("gateway.Tenant", "def f(cursor):\n    cursor.execute('DELETE FROM ' + Tenant._meta.db_table)"),
    "SQL with a gap": ("gateway.ApiKey", "def f(c):\n    c.execute('INSERT INTO {} VALUES (1)'.format(ApiKey._meta.db_table))"),
    "at import": ("governance.WebhookEndpoint", "WebhookEndpoint.objects.update(url='x')"),
}  # fmt: skip
"""Ways round, each in a made-up module. A net that catches nothing would prove nothing."""


@pytest.mark.parametrize("way", sorted(LEAKS))
def test_a_way_round_would_be_found(way: str) -> None:
    table, text = LEAKS[way]
    assert table in find_writes(text)


@pytest.mark.parametrize(
    "text",
    [
        "def f(key: ApiKey) -> None:\n    key.requests_per_minute = 9\n    key.save()",
        "def f():\n    ApiKey.objects.filter(pk=1).update(priority='high')",
        "def f(values):\n    Tenant.objects.update(**values)",
        "def f(tenant, field):\n    setattr(tenant, field, 9)\n    tenant.save()",
    ],
    ids=["attribute", "update", "values", "setattr"],
)
def test_a_new_writer_of_limits_would_be_found(text: str) -> None:
    assert sets_limits(text)


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    return Operation.objects.filter(state='pending').count()",
        "def f(one):\n    RequestRecord.objects.filter(pk=one.pk).update(state='x')\n    return one.runs.all()",
        "def f(hasher, operation: Operation) -> None:\n    hasher.update(operation.statement)",
    ],
    ids=["reading", "another table", "a hash"],
)
def test_what_only_reads_is_no_writer(text: str) -> None:
    assert find_writes(text) == set()


def test_a_service_without_the_guard_is_told_from_one_with_it() -> None:
    assert asks_guard("gateway/services/tenants.py", "change_tenant_limit")
    assert not asks_guard("gateway/services/tenants.py", "disable_tenant")
