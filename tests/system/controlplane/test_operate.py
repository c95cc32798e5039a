"""``muster status``, ``doctor``, ``upgrade``, ``logs`` and ``chat``: what they see, and what they say of what is wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID
from django.conf import LazySettings
from django.core.management import call_command
from django.db import connection, transaction

from controlplane.commands import Command
from controlplane.launcher.console import LauncherError
from controlplane.operate.backup import check_server
from controlplane.operate.chat import Chat, find_key, find_url, obey, read_stream
from controlplane.operate.doctor import Level, Subject, check_certificate, check_secrets, examine, ok
from controlplane.operate.installation import Installation, Kind, find_installation
from controlplane.operate.logs import LogOptions, run_logs
from controlplane.operate.status import ATTENTION, NOT_RUNNING, describe, read_status
from controlplane.operate.upgrade import judge_versions, list_pending, run_check
from controlplane.system import Sign, read_parts
from governance.audit import BACKUP_CREATED, record_event
from tests.fakes.limits import set_limits
from tests.fakes.nodes import make_gateway, make_node
from tests.fakes.tls import make_key, write_key
from wire import RELEASE, clock


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch, settings: LazySettings, tmp_path: Path) -> Installation:
    for name in ("MUSTER_ADMIN_PAGES", "DATABASE_URL", "MUSTER_SECRET_KEY", "MUSTER_LOG_KEY"):
        monkeypatch.setenv(name, "1")  # put back at the end: the commands set them
    settings.PUBLIC_URL = "http://127.0.0.1:1"
    settings.GATEWAY_PUBLIC_URL = "http://127.0.0.1:1"
    database = settings.DATABASES["default"]
    url = f"postgresql://{database['USER']}@/{connection.settings_dict['NAME']}?host={database['HOST']}"
    return Installation(Kind.SERVICES, tmp_path, {"DATABASE_URL": url, "MUSTER_SECRET_KEY": "x" * 40, "MUSTER_LOG_KEY": "y"})


@pytest.mark.django_db
def test_status_of_services_shows_parts_and_nodes_and_says_what_it_cannot_see(services: Installation) -> None:
    make_gateway()
    make_node("one", agent_version=RELEASE)
    status = read_status(services)
    assert {part["name"] for part in status.parts} >= {"Gateways", "Database", "Valkey", "Worker", "Backups"}
    assert [node["name"] for node in status.nodes] == ["one"]
    assert [why.partition(":")[0] for why in status.unseen] == ["processes", "http", "http"]
    assert status.exit == ATTENTION
    assert "Not seen" in describe(status)


def test_what_does_not_run_has_a_status_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL")
    for kind, said in ((Kind.NONE, "There is no installation"), (Kind.STOPPED, "it does not run")):
        if kind is Kind.STOPPED:
            (tmp_path / "credentials.json").write_text("{}")
        found = find_installation(tmp_path)
        assert found.kind is kind
        status = read_status(found)
        assert (status.exit, said in describe(status)[0]) == (NOT_RUNNING, True)


@pytest.mark.django_db
def test_a_check_that_fails_or_hangs_keeps_no_other_back(services: Installation) -> None:
    set_limits(console={"doctor_s": 0.3})
    stuck = threading.Event()

    def hang(_subject: Subject) -> list[object]:
        stuck.wait(30)
        return []

    def break_down(_subject: Subject) -> list[object]:
        raise ZeroDivisionError("a defect")

    checks = {"hangs": hang, "breaks": break_down, "works": lambda _subject: [ok("fine")]}
    found = dict(examine(services, checks))  # type: ignore[arg-type]  # of findings
    stuck.set()
    assert "took longer" in found["hangs"].what
    assert "a defect" in found["breaks"].what
    assert found["works"].level is Level.OK


def test_doctor_says_that_a_database_and_a_valkey_do_not_answer_and_what_to_do(
    services: Installation, settings: LazySettings
) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    away = Installation(services.kind, services.data, {**services.variables, "DATABASE_URL": "postgresql://127.0.0.1:1/muster"})
    found = {name: finding for name, finding in examine(away) if finding.level is Level.FAILED}
    assert "does not answer" in found["database"].what
    assert "DATABASE_URL" in found["database"].advice
    assert "REDIS_URL" in found["valkey"].advice
    assert set(found) >= {"servers"}


def test_doctor_finds_secrets_that_others_may_read(tmp_path: Path) -> None:
    (tmp_path / "secret_key").write_text("s")
    (tmp_path / "secret_key").chmod(0o640)
    found = list(check_secrets(Subject(Installation(Kind.STOPPED, tmp_path, {"MUSTER_SECRET_KEY": "s"}))))
    assert any(finding.level is Level.FAILED and f"chmod 600 {tmp_path}/secret_key" in finding.advice for finding in found)


def test_doctor_judges_the_name_and_the_end_of_a_certificate(tmp_path: Path, settings: LazySettings) -> None:
    key, now = make_key(), clock.now()
    for ends_in, level in ((timedelta(days=90), Level.OK), (timedelta(days=3), Level.WARNING), (timedelta(0), Level.FAILED)):
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "muster")])
        made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(days=9), now + ends_in)
        made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("*.example.com")]), critical=False)
        (tmp_path / "c.pem").write_bytes(
            made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM) + write_key(key).encode()
        )
        settings.TLS_CERT = str(tmp_path / "c.pem")
        settings.TLS_KEY = str(tmp_path / "c.pem")
        for host, wanted in (("muster.example.com", level), ("muster.example.org", Level.FAILED)):
            settings.PUBLIC_URL = f"https://{host}"
            found = list(check_certificate(Subject(Installation(Kind.STOPPED, tmp_path, {}))))
            assert found[0].level is wanted, found


class _OldServer:
    class info:  # noqa: N801  # as psycopg has it
        server_version = 140_012


def test_an_old_server_is_named_with_what_is_needed() -> None:
    with pytest.raises(LauncherError, match="PostgreSQL 14; Muster needs 15 or newer"):
        check_server(_OldServer())  # type: ignore[arg-type]  # a server that is not there


@pytest.mark.django_db(transaction=True)
def test_upgrade_check_names_a_database_of_a_newer_release(services: Installation, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_pending() == []
    assert run_check(services) == 0
    assert "nothing to migrate" in capsys.readouterr().out
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO django_migrations (app, name, applied) VALUES ('nodes', '9999_later', now())")
        try:
            assert run_check(services) == 1
        finally:
            cursor.execute("DELETE FROM django_migrations WHERE name = '9999_later'")
    assert f"nodes.9999_later is unknown to {RELEASE}" in capsys.readouterr().out


@pytest.mark.django_db
def test_a_start_on_a_database_of_a_newer_release_goes_on_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO django_migrations (app, name, applied) VALUES ('gateway', '9999_later', now())")
    call_command(Command("bootstrap"), "--credentials", str(tmp_path / "credentials.json"))
    said = capsys.readouterr().out
    assert f"warning: the database is of a newer release (gateway.9999_later is unknown to {RELEASE})" in said


@pytest.mark.django_db
def test_nodes_of_other_releases_are_named() -> None:
    make_gateway(release="98.0.0")
    make_node("old", agent_version="0.0.1")
    make_node("new", agent_version="99.0.0")
    assert judge_versions()[0] == ("The gateway host:1 runs 98.0.0", f"Restart it with {RELEASE}")
    assert sorted(text.removeprefix("1 node runs ") for text, _advice in judge_versions()[1:]) == [
        "0.0.1, which is older", "99.0.0, which is newer than this server",
    ]  # fmt: skip
    part = next(part for part in read_parts() if part.name == "Versions of nodes")
    assert (part.sign, part.what) == (Sign.ATTENTION, "1 node is newer than this server.")
    gateways = next(part for part in read_parts() if part.name == "Gateways")
    assert (gateways.sign, gateways.facts[0][0]) == (Sign.ATTENTION, "host:1 · 98.0.0")


@pytest.mark.django_db
def test_the_age_of_the_last_backup_is_shown_once_there_was_one() -> None:
    def look() -> Sign:
        return next(part.sign for part in read_parts() if part.name == "Backups")

    assert look() is Sign.UNKNOWN
    with transaction.atomic():
        record_event(actor="system:cli", action=BACKUP_CREATED, target="muster.zip")
    assert look() is Sign.OK
    set_limits(console={"backup_age_s": -1.0})
    assert look() is Sign.ATTENTION


def test_the_logs_of_one_part_or_of_all_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "gateway.log").write_text("a\nb\nc\n")
    (logs / "node.log").write_text("d\n")
    here = Installation(Kind.STOPPED, tmp_path, {})
    assert run_logs(here, LogOptions("gateway", lines=2)) == 0
    assert capsys.readouterr().out == "b\nc\n"
    run_logs(here, LogOptions())
    assert capsys.readouterr().out == "gateway | a\ngateway | b\ngateway | c\nnode    | d\n"
    with pytest.raises(LauncherError, match=r"there is no log of worker in .*; there are gateway, node"):
        run_logs(here, LogOptions("worker"))


STREAM = b"".join(
    b"data: " + json.dumps({"choices": [{"delta": {"content": piece}}]}).encode() + b"\n\n" for piece in ("Hel", "lo")
)


class _Gateway(BaseHTTPRequestHandler):
    asked: list[dict[str, object]] = []

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "tiny"}, {"id": "big"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["model"] == "big":
            self._answer(503, b'{"error": {"message": "No node answers for big."}}')
        else:
            self._answer(200, STREAM + b"data: [DONE]\n\n")

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_words: object) -> None:
        return


@pytest.fixture
def chat() -> Iterator[Chat]:
    _Gateway.asked.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Chat(f"http://127.0.0.1:{server.server_port}/v1", "mst_key", "tiny")
    server.shutdown()
    server.server_close()


def test_a_chat_sends_the_turns_before_and_keeps_only_what_was_answered(chat: Chat, tmp_path: Path) -> None:
    assert obey(chat, "/system Be brief.") == "The instructions hold from the next turn on."
    assert "".join(chat.ask("Hi")) == "Hello"
    chat.model = "big"
    with pytest.raises(LauncherError, match="503: No node answers for big"):
        list(chat.ask("And you?"))
    assert obey(chat, "/model tiny") == "tiny answers from here on."
    list(chat.ask("Again"))
    assert [turn["content"] for turn in _Gateway.asked[-1]["messages"]] == ["Be brief.", "Hi", "Hello", "Again"]  # type: ignore[attr-defined]
    assert obey(chat, "/model huge") == "This key may not use huge, or nobody has it."
    assert "Wrote 2 turns" in obey(chat, f"/save {tmp_path / 'c.json'}")
    assert json.loads((tmp_path / "c.json").read_text())["messages"] == chat.turns
    assert obey(chat, "/new") == "The conversation is forgotten."
    assert not chat.turns


def test_an_answer_that_is_cut_short_by_the_person_counts_as_far_as_it_came(chat: Chat) -> None:
    answer = chat.ask("Hi")
    assert next(answer) == "Hel"
    answer.close()  # type: ignore[attr-defined]  # it is a generator
    assert chat.turns == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]


def test_an_error_inside_a_stream_is_said() -> None:
    with pytest.raises(LauncherError, match="the node is gone"):
        list(read_stream(iter(['data: {"error": {"message": "the node is gone"}}'])))


def test_a_chat_finds_gateway_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSTER_API_KEY", raising=False)
    assert find_url(tmp_path, "http://gateway:8080/") == "http://gateway:8080/v1"
    assert find_url(tmp_path, "") == "http://127.0.0.1:8080/v1"
    with pytest.raises(LauncherError, match="set MUSTER_API_KEY"):
        find_key(tmp_path, None)
    (tmp_path / "credentials.json").write_text('{"api_key": "mst_1"}')
    assert find_key(tmp_path, None) == "mst_1"
