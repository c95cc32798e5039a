"""Management commands call the same services as the pages."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from core.models import User
from gateway.models import ApiKey, Model
from governance.services import verify_admin_token
from nodes.models import Node, Provider
from nodes.services import find_credential
from tests.system.gateway_admin.factories import audited
from tests.system.nodes.factories import make_credential, make_node

pytestmark = pytest.mark.django_db


def run(*words: str) -> str:
    output = StringIO()
    call_command(*words, stdout=output)
    return output.getvalue().strip()


def test_a_model_is_allowed_and_disallowed() -> None:
    run("allow_model", "tiny", "--max-tokens", "100")
    assert Model.objects.get(name="tiny", allowed=True).max_tokens == 100
    run("disallow_model", "tiny")
    assert not Model.objects.get(name="tiny").allowed
    assert audited("model.allow")[0].actor == "system:cli"


def test_a_key_is_printed_and_nothing_else_is() -> None:
    text = run("create_key", "--tenant", "research", "--name", "ci", "--rpm", "7", "--models", "a,b", "--priority", "low")
    key = ApiKey.objects.get()

    assert text.startswith(f"mst_{key.keyid}_")
    assert (key.tenant.name, key.requests_per_minute, key.allowed_models) == ("research", 7, ["a", "b"])
    assert key.priority == "low"
    run("create_key", "--tenant", "research", "--name", "second")
    assert ApiKey.objects.count() == 2


def test_a_worker_credential_is_printed_with_its_provider_made() -> None:
    credential = find_credential(run("create_worker_credential", "--name", "box", "--provider", "lab", "--max-nodes", "3"))

    assert credential is not None
    assert (credential.provider.name, credential.max_nodes) == ("lab", 3)


def test_an_admin_token_is_printed_and_belongs_to_whom_it_was_made_for() -> None:
    ben = User.objects.create_user("ben")
    for words, owner in (((), None), (("--owner", "ben"), ben)):
        token = verify_admin_token(run("create_admin_token", "--name", "ci", *words))
        assert token is not None
        assert token.owner == owner


def test_a_provider_is_switched_off_and_on() -> None:
    make_credential(provider="lab")
    run("set_provider_state", "lab", "disabled")
    assert Provider.objects.get(name="lab").state == "disabled"
    run("set_provider_state", "lab", "enabled")
    assert Provider.objects.get(name="lab").state == "enabled"


@pytest.mark.parametrize("named_by", ["name", "printed id", "uuid"])
def test_a_node_is_cordoned_and_drained_however_it_is_named(named_by: str) -> None:
    node = make_node("attic")
    text = {"name": node.name, "printed id": node.printed_id, "uuid": str(node.pk)}[named_by]

    run("node_action", text, "cordon")
    run("node_action", text, "drain", "--reason", "new driver", "--timeout", "5")
    node.refresh_from_db()
    assert (node.cordoned, node.draining, node.drain_reason) == (True, True, "new driver")

    run("node_action", text, "undrain")
    run("node_action", text, "uncordon")
    node.refresh_from_db()
    assert (node.cordoned, node.draining) == (False, False)


@pytest.mark.parametrize(
    "words",
    [
        ("disallow_model", "nothing"),
        ("allow_model", "tiny", "--max-tokens", "0"),
        ("create_key", "--tenant", "t", "--name", ""),
        ("create_worker_credential", "--name", "x", "--max-nodes", "0"),
        ("create_admin_token", "--name", " "),
        ("create_admin_token", "--name", "ci", "--owner", "nobody"),
        ("set_provider_state", "nothing", "disabled"),
        ("node_action", "nothing", "drain"),
    ],
)
def test_a_refusal_is_one_line(words: tuple[str, ...]) -> None:
    with pytest.raises(CommandError) as refusal:
        run(*words)

    assert "\n" not in str(refusal.value)


def test_a_name_that_two_nodes_have_is_not_guessed() -> None:
    for credential in ("one", "two"):
        make_node("box", credential=make_credential(credential)[0])

    with pytest.raises(CommandError, match="Several nodes"):
        run("node_action", "box", "drain")
    assert not Node.objects.filter(draining=True).exists()
