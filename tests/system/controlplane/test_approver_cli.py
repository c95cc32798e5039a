"""``./muster keys`` and ``./muster approve``, against control planes that tell the truth and ones that lie."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from controlplane.approver_cli import describe, main
from governance.models import Decision
from governance.services import create_admin_token
from governance.services.approver_keys import add_key_file
from tests.fakes.control_process import serve_control
from tests.fakes.governed_team import make_team, propose_token
from tests.fakes.passkeys import KeyFile
from tests.fakes.policies import make_people, make_policy, make_statement
from wire.optoken.approval import Statement, decode_bytes, digest_words, encode_bytes, load_public_key, read_statement


@dataclass
class Plane:
    """A control plane of one operation. ``answer`` is what it says of it; ``posted`` what was handed in."""

    statement: Statement
    answer: dict[str, Any] = field(default_factory=dict)
    posted: list[tuple[str, str, Any]] = field(default_factory=list)
    status: int = 200
    refusal: str = "somebody else must"
    port: int = 0

    def say(self, **changes: Any) -> None:
        """Answer with the statement, and with ``changes``."""
        said = {"statement_b64": encode_bytes(self.statement.raw), "digest": self.statement.digest.hex(), "state": "pending"}
        self.answer = said | changes


@pytest.fixture
def plane() -> Iterator[Plane]:
    """A control plane on loopback."""
    policy = make_policy(make_people(3))
    here = Plane(make_statement(policy, op_id="op_" + "0" * 31 + "1", params={"modelId": "org/model", "count": 1, "text": "1"}))
    here.say()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(here.answer)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            here.posted.append((self.path, self.headers["Authorization"], body))
            self.reply({"state": "approved"} if here.status == 200 else {"error": {"message": here.refusal}}, here.status)

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
    """A key file of bob without a passphrase, and a token beside it."""
    assert main(["keys", "new", "--name", "bob", "--dir", str(tmp_path), "--no-passphrase"]) == 0
    (tmp_path / "token").write_text("msa_token\n")
    capsys.readouterr()
    return tmp_path / "bob.key"


def approve(plane: Plane, key: Path, *more: str, words: str | None = None) -> int:
    """Approve the operation with its own words; the exit status."""
    where = ["--url", f"http://127.0.0.1:{plane.port}", "--token-file", str(key.with_name("token")), "--key", str(key)]
    said = words if words is not None else digest_words(plane.statement.digest)
    return main(["approve", *where, "--words", said, *more, plane.statement.op_id])


def test_a_key_file_is_private_and_its_line_is_public(key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert key.stat().st_mode & 0o777 == 0o600
    assert main(["keys", "show", "--dir", str(key.parent)]) == 0
    word, spki, name = capsys.readouterr().out.split()
    assert (word, name) == ("ed25519", "bob")
    assert isinstance(load_public_key(decode_bytes(spki)), Ed25519PublicKey)
    before = key.read_bytes()
    assert main(["keys", "new", "--name", "bob", "--dir", str(key.parent), "--no-passphrase"]) == 1
    assert key.read_bytes() == before


def test_the_proof_is_one_that_boxes_read(plane: Plane, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert approve(plane, key) == 0
    ((path, bearer, body),) = plane.posted
    assert path == f"/api/v1/operations/{plane.statement.op_id}/approvals"
    assert bearer == "Bearer msa_token"
    proof = body["proof"]
    spki = decode_bytes(key.with_suffix(".pub").read_text().split()[1])
    load_public_key(spki).verify(decode_bytes(proof["signature"]), plane.statement.digest)  # type: ignore[call-arg]  # Ed25519
    assert proof.keys() == KeyFile().sign(b"", approver="bob").keys()
    assert (proof["type"], proof["approver"]) == ("ed25519", "bob")
    out = capsys.readouterr().out
    assert "The operation is approved now" in out
    assert "msa_token" not in out


@pytest.mark.parametrize(
    ("stops", "words"), [(True, "the rest is left alone"), (False, "the rest goes on")], ids=["stops", "on"]
)
def test_of_a_batch_it_is_said_what_a_failure_does(stops: bool, words: str) -> None:
    batch = make_statement(make_policy(make_people(3)), targets=["box-7", "box-8"], stops_on_failure=stops)
    assert words in describe(batch)


def test_other_words_and_nobody_to_ask_sign_nothing(
    plane: Plane, key: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert approve(plane, key, words="babab-babab-babab-babab-babab-babab") == 1
    assert "not the six words" in capsys.readouterr().err
    where = ["--url", f"http://127.0.0.1:{plane.port}", "--token-file", str(key.with_name("token")), "--key", str(key)]
    with Path(os.devnull).open() as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        assert main(["approve", *where, plane.statement.op_id]) == 1
    assert "nobody is here" in capsys.readouterr().err
    assert plane.posted == []


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"digest": "0" * 64}, "another digest"),
        ({"statement_b64": encode_bytes(b'{"v": 1}')}, "canonical"),
        ({"statement_b64": None}, "base64url"),
    ],
    ids=["digest", "not canonical", "nothing"],
)
def test_a_lying_control_plane_gets_no_signature(
    plane: Plane, key: Path, capsys: pytest.CaptureFixture[str], lie: dict[str, Any], said: str
) -> None:
    plane.say(**lie)
    assert approve(plane, key) == 1
    assert said in capsys.readouterr().err
    assert plane.posted == []


def test_another_operation_than_the_one_asked_for_is_not_signed(
    plane: Plane, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_statement(make_policy(make_people(3)), op_id="op_" + "0" * 31 + "2")
    plane.answer = {"statement_b64": encode_bytes(other.raw)}
    assert approve(plane, key, words=digest_words(other.digest)) == 1
    assert "another operation" in capsys.readouterr().err
    assert plane.posted == []


def test_words_of_the_control_plane_reach_no_terminal_as_commands(
    plane: Plane, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plane.status, plane.refusal = 403, "no\x1b[2J\u202eApproved." + "x" * 5000
    assert approve(plane, key) == 1
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err
    assert "\u202e" not in said.err
    assert len(said.err) < 1000


def test_a_key_file_that_others_can_read_is_not_used(plane: Plane, key: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key.chmod(0o644)
    assert approve(plane, key) == 1
    assert "chmod 600" in capsys.readouterr().err
    assert plane.posted == []


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


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(240)
def test_a_real_control_plane_counts_the_approval(key: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    team = make_team("ana", "bob", "cleo")
    line = key.with_suffix(".pub").read_text()
    add_key_file(user=team[1].user, line=line, actor="user:bob")
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
