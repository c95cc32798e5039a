"""What checks credentials asks the database in no words of its own."""

from __future__ import annotations

import ast
import inspect
from types import ModuleType

import pytest

import controlplane.authentication
import core.throttle
import gateway.auth
import governance.services.admin_tokens
import nodes.authentication
import nodes.consumers.endpoint
import nodes.services.credentials
import wire.credentials

MODULES = (
    controlplane.authentication,
    gateway.auth,
    governance.services.admin_tokens,
    core.throttle,
    nodes.authentication,
    nodes.consumers.endpoint,
    nodes.services.credentials,
    wire.credentials,
)
RAW = {"raw", "extra", "RawSQL", "cursor", "execute", "executemany", "connection", "connections"}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_no_module_that_checks_credentials_writes_sql(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not used & RAW
