"""Commands of the server call the services of the pages; ``./muster keys`` and ``approve`` trust no control plane."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from django.apps import apps
from django.conf import settings
from django.core.checks.registry import registry
from django.core.management import CommandError, call_command
from django.core.management.base import SystemCheckError
from django.test import Client, override_settings

from controlplane.approver_cli import describe, main
from controlplane.commands import SETTINGS_CHECKS, Command, run_command
from controlplane.commands.bootstrap import ACTOR, MODEL, USERNAME, make_credentials
from controlplane.launcher.files import read_json, write_json
from controlplane.launcher.installation import require_credentials
from core.models import User
from gateway.models import ApiKey, Model
from gateway.services.keys import revoke_api_key
from gateway.services.models import disallow_model, is_model_allowed
from governance.admin_tokens import create_admin_token, revoke_admin_token, verify_admin_token
from governance.keys import add_key_file
from governance.models import Decision
from nodes.models import Node, NodeCredential, Provider
from nodes.services.credentials import find_credential, revoke_credential
from tests.fakes.control_process import serve_control
from tests.fakes.governed_team import make_governed, make_key, make_team, propose_token
from tests.fakes.nodes import audited, make_credential, make_node
from tests.fakes.passkeys import KeyFile
from tests.fakes.policies import make_people, make_policy, make_statement
from wire.credentials import CredentialKind, parse_keyid
from wire.optoken.approval import Statement, decode_bytes, digest_words, encode_bytes, load_public_key, read_statement

pytestmark = pytest.mark.django_db


def run(*words: str) -> str:
    output = StringIO()
    call_command(Command(words[0]), *words[1:], stdout=output)
    return output.getvalue().strip()


def test_models_keys_credentials_tokens_and_providers_are_managed() -> None:
    run("allow_model", "tiny", "--max-tokens", "100")
    assert Model.objects.get(name="tiny", allowed=True).max_tokens == 100
    run("disallow_model", "tiny")
    assert not Model.objects.get(name="tiny").allowed
    assert audited("model.allow")[0].actor == "system:cli"
    text = run("create_key", "--tenant", "research", "--name", "ci", "--rpm", "7", "--models", "a,b", "--priority", "low")
    key = ApiKey.objects.get()
    assert text.startswith(f"mst_{key.keyid}_")
    assert (key.tenant.name, key.requests_per_minute, key.allowed_models, key.priority) == ("research", 7, ["a", "b"], "low")
    run("create_key", "--tenant", "research", "--name", "second")
    assert ApiKey.objects.count() == 2
    credential = find_credential(run("create_worker_credential", "--name", "box", "--provider", "lab", "--max-nodes", "3"))
    assert credential is not None
    assert (credential.provider.name, credential.max_nodes) == ("lab", 3)
    for state in ("disabled", "enabled"):
        run("set_provider_state", "lab", state)
        assert Provider.objects.get(name="lab").state == state
    assert run("set_provider_terms", "lab", "--max-queue", "7") == "lab has max_queue 7"
    assert Provider.objects.get(name="lab").max_queue == 7
    assert run("set_provider_terms", "lab") == "lab has no terms of its own"
    assert run("create_worker_credential", "--name", "own", "--provider", "lab", "--allow-models")
    assert NodeCredential.objects.get(name="own").allows_models
    ben = User.objects.create_user("ben")
    for words, owner in (((), None), (("--owner", "ben"), ben)):
        token = verify_admin_token(run("create_admin_token", "--name", "ci", *words))
        assert token is not None
        assert token.owner == owner


def test_a_node_is_cordoned_and_drained_however_it_is_named_and_one_of_two_is_not_guessed() -> None:
    node = make_node("attic")
    for text in (node.name, node.printed_id, str(node.pk)):
        run("node_action", text, "cordon")
        run("node_action", text, "drain", "--reason", "new driver", "--timeout", "5")
        node.refresh_from_db()
        assert (node.cordoned, node.draining, node.drain_reason) == (True, True, "new driver")
        run("node_action", text, "undrain")
        run("node_action", text, "uncordon")
        node.refresh_from_db()
        assert (node.cordoned, node.draining) == (False, False)
    for credential in ("one", "two"):
        make_node("box", credential=make_credential(credential)[0])
    with pytest.raises(CommandError, match="Several nodes"):
        run("node_action", "box", "drain")
    assert not Node.objects.filter(draining=True).exists()


@pytest.mark.parametrize("name", ["allow_model", "audit", "bootstrap", "migrate", "createsuperuser", "changepassword"])
def test_help_says_muster_and_only_the_own_options_of_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run_command([name, "--help"])
    shown = capsys.readouterr().out
    assert (ended.value.code, shown.split()[:2]) == (0, ["usage:", "muster"])
    assert f" {name} " in shown.splitlines()[0]
    of_django = r"--(settings|pythonpath|traceback|no-color|force-color|skip-checks|verbosity|version)\b"
    assert not re.search(rf"manage\.py|{of_django}", shown)


REFUSED = [
    "disallow_model nothing", "allow_model tiny --max-tokens 0", "create_key --tenant t --name _",
    "create_worker_credential --name x --max-nodes 0", "create_admin_token --name _",
    "create_admin_token --name ci --owner nobody", "set_provider_state nothing disabled", "node_action nothing drain",
]  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_a_refusal_is_one_line(line: str) -> None:
    with pytest.raises(CommandError) as refusal:
        run(*(word.replace("_", " ") if word == "_" else word for word in line.split()))
    assert "\n" not in str(refusal.value)


def test_commands_look_at_the_settings_of_every_app_of_ours(tmp_path: Path) -> None:
    ours = {"controlplane", "core", "gateway", "governance", "nodes"}
    checks = [check for check in registry.get_checks() if check.__module__.partition(".")[0] in ours]
    assert {tag for check in checks for tag in check.tags} == set(SETTINGS_CHECKS)
    with (
        override_settings(CORS_ORIGINS=("chat.example.com",)),
        pytest.raises(SystemCheckError, match="MUSTER_CORS_ORIGINS"),
    ):
        call_command(Command("bootstrap"), credentials=tmp_path / "credentials.json", skip_checks=False)
    assert not (tmp_path / "credentials.json").exists()


def bootstrap(path: Path) -> dict[str, object]:
    call_command(Command("bootstrap"), credentials=path)
    return read_json(path)


def test_everything_is_made_once_and_the_file_is_private(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    assert bootstrap(path) == bootstrap(path)
    made = require_credentials(path)
    assert path.stat().st_mode & 0o777 == 0o600
    user = User.objects.get(username=made.username)
    assert user.check_password(made.password)
    assert (user.is_superuser, user.is_staff) == (True, True)
    assert verify_admin_token(made.admin_token)
    assert parse_keyid(made.api_key, CredentialKind.CLIENT)
    assert is_model_allowed(made.model)
    for text, nodes in ((made.worker_secret, 64), (made.node_token, 64), (made.local_node_token, 1)):
        credential = find_credential(text)
        assert credential is not None
        assert credential.max_nodes == nodes


def test_what_was_revoked_is_made_anew_and_what_the_operator_changed_stays_theirs(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    before = bootstrap(path)
    token, worker = verify_admin_token(str(before["admin_token"])), find_credential(str(before["worker_secret"]))
    assert token is not None
    assert worker is not None
    key = ApiKey.objects.get(keyid=parse_keyid(str(before["api_key"]), CredentialKind.CLIENT))
    revoke_admin_token(token_id=token.pk, actor=ACTOR)
    revoke_credential(credential_id=worker.pk, actor=ACTOR)
    revoke_api_key(key_id=key.pk, actor=ACTOR)
    after = bootstrap(path)
    assert {name for name in before if before[name] != after[name]} == {"admin_token", "worker_secret", "api_key"}
    user = User.objects.get(username=USERNAME)
    user.set_password("chosen by the operator")
    user.save()
    disallow_model(name=MODEL, actor=ACTOR)
    kept = bootstrap(path)
    assert kept["admin"] == {"username": USERNAME, "password": ""}
    make_credentials(kept)
    assert not is_model_allowed(MODEL)
    user.refresh_from_db()
    assert user.check_password("chosen by the operator")
    User.objects.create_superuser("somebody", password="a long enough one")
    user.delete()
    bootstrap(path)
    assert not User.objects.filter(username=USERNAME).exists(), "deleted for another"


def test_under_a_policy_a_revoked_admin_token_is_not_made_anew_and_the_rest_still_works(tmp_path: Path) -> None:
    path = tmp_path / "credentials.json"
    token = verify_admin_token(str(bootstrap(path)["admin_token"]))
    assert token is not None
    make_governed()
    assert verify_admin_token(str(bootstrap(path)["admin_token"])) == token
    revoke_admin_token(token_id=token.pk, actor=ACTOR)
    assert bootstrap(path)["admin_token"] == ""
    assert require_credentials(path).admin_token == ""


def test_the_demonstration_invites_three_people_and_says_the_steps(tmp_path: Path) -> None:
    def demo(*words: str) -> str:
        return run("demo_governance", "--model", "muster-tiny-f16", *words)

    first = json.loads(demo("--json"))["people"]
    assert [person["username"] for person in first] == ["ana", "ben", "cleo"]
    assert is_model_allowed("muster-tiny-f16")
    paths = [person["invitation"].removeprefix(settings.PUBLIC_URL) for person in first]
    assert [Client().get(path).status_code for path in paths] == [200] * 3
    assert [User.objects.get(username=name).has_perm("governance.add_operation") for name in ("ana", "ben")] == [True, False]
    assert not any(user.is_superuser or user.has_usable_password() for user in User.objects.all())
    make_key(User.objects.get(username="ana"))
    second = json.loads(demo("--json"))["people"]  # new links for whoever has no passkey yet
    assert second[0]["invitation"] == ""
    assert second[1]["invitation"] not in {"", first[1]["invitation"]}
    assert Client().get(paths[1]).status_code != 200
    (tmp_path / "run").mkdir()
    write_json(tmp_path / "run" / "installation.json", {"gateway_url": "http://127.0.0.1:9", "api_key": "mst_mine"})
    said = demo("--data", str(tmp_path))
    for words in (f"./muster trust WORDS --data {tmp_path}", "curl http://127.0.0.1:9/v1/chat/completions", "Bearer mst_mine"):
        assert words in said


# ./muster keys and ./muster approve


@dataclass
class Plane:
    """A control plane of one operation. ``answer`` is what it says of it; ``posted`` what was handed in."""

    statement: Statement
    answer: dict[str, Any] = field(default_factory=dict)
    posted: list[tuple[str, str, Any]] = field(default_factory=list)
    status: int = 200
    port: int = 0

    def say(self, **changes: Any) -> None:
        """Answer with the statement, and with ``changes``."""
        said = {"statement_b64": encode_bytes(self.statement.raw), "digest": self.statement.digest.hex(), "state": "pending"}
        self.answer = said | changes


@pytest.fixture
def plane() -> Iterator[Plane]:
    policy = make_policy(make_people(3))
    here = Plane(make_statement(policy, op_id="op_" + "0" * 31 + "1", params={"modelId": "org/model", "count": 1, "text": "1"}))
    here.say()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(here.answer)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            here.posted.append((self.path, self.headers["Authorization"], body))
            refusal = {"error": {"message": "somebody else must\x1b[2J\u202eApproved." + "x" * 5000}}
            self.reply({"state": "approved"} if here.status == 200 else refusal, here.status)

        def reply(self, said: Any, status: int = 200) -> None:
            content = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_request(self, code: Any = "-", size: Any = "-") -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        here.port = server.server_port
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield here
        server.shutdown()
        thread.join()


@pytest.fixture
def key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["keys", "new", "--name", "bob", "--dir", str(tmp_path), "--no-passphrase"]) == 0
    (tmp_path / "token").write_text("msa_token\n")
    capsys.readouterr()
    return tmp_path / "bob.key"


def approve(plane: Plane, key: Path, *, words: str | None = None) -> int:
    """Approve the operation with its own words, "" for none; the exit status."""
    where = ["--url", f"http://127.0.0.1:{plane.port}", "--token-file", str(key.with_name("token")), "--key", str(key)]
    said = words if words is not None else digest_words(plane.statement.digest).replace("-", " ").upper()
    return main(["approve", *where, *(["--words", said] if said else []), plane.statement.op_id])


def test_a_key_file_is_private_and_its_line_is_public(plane: Plane, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert key.stat().st_mode & 0o777 == 0o600
    assert main(["keys", "show", "--dir", str(key.parent)]) == 0
    word, spki, name = capsys.readouterr().out.split()
    assert (word, name) == ("ed25519", "bob")
    assert isinstance(load_public_key(decode_bytes(spki)), Ed25519PublicKey)
    before = key.read_bytes()
    assert main(["keys", "new", "--name", "bob", "--dir", str(key.parent), "--no-passphrase"]) == 1
    assert key.read_bytes() == before
    key.chmod(0o644)
    assert approve(plane, key) == 1
    assert "chmod 600" in capsys.readouterr().err
    assert plane.posted == []


def test_the_proof_is_one_that_boxes_read(plane: Plane, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert approve(plane, key) == 0
    ((path, bearer, body),) = plane.posted
    assert (path, bearer) == (f"/api/v1/operations/{plane.statement.op_id}/approvals", "Bearer msa_token")
    proof = body["proof"]
    spki = decode_bytes(key.with_suffix(".pub").read_text().split()[1])
    load_public_key(spki).verify(decode_bytes(proof["signature"]), plane.statement.digest)  # type: ignore[call-arg]  # Ed25519
    assert proof.keys() == KeyFile().sign(b"", approver="bob").keys()
    assert (proof["type"], proof["approver"]) == ("ed25519", "bob")
    out = capsys.readouterr().out
    assert "The operation is approved now" in out
    assert "msa_token" not in out
    rows = dict(line.split("  ", 1) for line in describe(plane.statement).splitlines())
    assert (rows["With count"].strip(), rows["With text"].strip()) == ("1", '"1"')
    for stops, words in ((True, "the rest is left alone"), (False, "the rest goes on")):
        batch = make_statement(make_policy(make_people(3)), targets=["box-7", "box-8"], stops_on_failure=stops)
        assert words in describe(batch)


OTHER = make_statement(make_policy(make_people(3)), op_id="op_" + "0" * 31 + "2")
LIES: list[tuple[dict[str, Any], str | None, str]] = [
    ({"digest": "0" * 64}, None, "another digest"), ({"statement_b64": encode_bytes(b'{"v": 1}')}, None, "canonical"),
    ({"statement_b64": None}, None, "base64url"),
    ({"statement_b64": encode_bytes(OTHER.raw), "digest": OTHER.digest.hex()}, digest_words(OTHER.digest), "another operation"),
    ({}, "babab-babab-babab-babab-babab-babab", "not the six words"), ({}, "", "nobody is here"),
]  # fmt: skip


@pytest.mark.parametrize(("lie", "words", "said"), LIES, ids=range(len(LIES)))
def test_lies_other_words_and_nobody_to_ask_sign_nothing(
    plane: Plane, key: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lie: dict[str, Any],
    words: str | None, said: str,
) -> None:  # fmt: skip
    plane.say(**lie)
    with Path(os.devnull).open() as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        assert approve(plane, key, words=words) == 1
    assert said in capsys.readouterr().err
    assert plane.posted == []


def test_words_of_the_control_plane_reach_no_terminal_as_commands(
    plane: Plane, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plane.status = 403
    assert approve(plane, key) == 1
    said = capsys.readouterr()
    assert "refused (403): somebody else must" in said.err
    assert "\x1b" not in said.out + said.err
    assert "\u202e" not in said.err
    assert len(said.err) < 1000


def test_a_passphrase_opens_the_key_file_and_another_does_not(
    plane: Plane, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = ["correct horse", "correct horse", "wrong", "correct horse"]
    monkeypatch.setattr("getpass.getpass", lambda prompt: typed.pop(0))
    assert main(["keys", "new", "--name", "bob", "--dir", str(tmp_path)]) == 0
    (tmp_path / "token").write_text("msa_token")
    key = tmp_path / "bob.key"
    assert b"ENCRYPTED" in key.read_bytes()
    assert approve(plane, key) == 1
    assert "another passphrase" in capsys.readouterr().err
    assert approve(plane, key) == 0


def test_a_key_is_not_made_where_nobody_can_be_asked_for_a_passphrase(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("getpass.getpass", ask)
    assert main(["keys", "new", "--name", "bob", "--dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "muster: there is no terminal to ask on; --help names the option that answers\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(240)
def test_a_real_control_plane_counts_the_approval(key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    team = make_team("ana", "bob", "cleo")
    add_key_file(user=team[1].user, line=key.with_suffix(".pub").read_text(), actor="user:bob")
    _, token = create_admin_token(name="of bob", actor="user:bob", owner=team[1].user)
    team.start()
    operation = propose_token(team[0])
    (tmp_path / "token").write_text(token)
    with serve_control(tmp_path / "control.log") as server:
        here = Plane(read_statement(bytes(operation.statement)), port=server.port)
        assert approve(here, key) == 0, capsys.readouterr().err
        assert approve(here, key) == 1
    decision = Decision.objects.get(operation=operation)
    assert (decision.person, decision.is_approval) == (team[1].user, True)
    assert decision.key is not None
    assert decision.key.kind == "ed25519"


def test_a_process_without_pages_migrates_the_same_tables() -> None:
    told = "print(*sorted(model._meta.db_table for model in apps.get_models()))"
    program = f"import django; django.setup(); from django.apps import apps; {told}"
    environment = {**os.environ, "MUSTER_ADMIN_PAGES": "0", "DJANGO_SETTINGS_MODULE": "controlplane.settings"}
    bare = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert bare.stdout.split() == sorted(model._meta.db_table for model in apps.get_models())
