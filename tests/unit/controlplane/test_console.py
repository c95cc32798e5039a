"""The console without HTTP: its settings and errors, what its first page says, and what the playground sends."""

from __future__ import annotations

import ast
import json
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.db import InterfaceError, OperationalError
from django.http import Http404
from django.utils import translation
from hypothesis import given, settings
from hypothesis import strategies as st
from rest_framework import exceptions

from controlplane.api_errors import describe_error
from controlplane.apps import is_gateway_url
from controlplane.env import (
    LOG_LEVELS,
    SettingError,
    collect_errors,
    raise_errors,
    read_address,
    read_bool,
    read_database,
    read_float,
    read_int,
    read_issuer,
    read_keyless,
    read_limits,
    read_log_level,
    read_name,
    read_networks,
    read_role,
    read_roles,
    read_secret,
    read_text,
    read_valkey,
)
from controlplane.playground.asks import SURFACES, Ask, AskRefused, build_body, read_ask
from controlplane.playground.relay import choose_headers
from controlplane.playground.snippets import JSON, PYTHON, expanding_json, print_literal, write_code
from controlplane.problem_words import KINDS, WORDS, WORDS_OF
from controlplane.problems import Facts, PolicyFact, SlowFacts, find_problems
from core.db import base
from core.db.base import DatabaseWrapper, WaitLimit, limit_process, limit_waits
from gateway.services.errors import InvalidValue, NameTaken
from gateway.services.explanations import Wait, WaitingModel
from gateway.services.requests import ExpiringKey, GatewayHealth, OpenRequests
from gateway.services.rollups import Sums
from gateway.services.usage import UsedBudget
from governance.alerts import Problem
from governance.errors import InvalidAdminToken
from governance.notices import FailingWebhook
from governance.registry import AlertFacts
from governance.states import Severity
from nodes.errors import NodeNotFound
from nodes.services.availability import FleetOverview, NodeHealth
from nodes.states import Freshness, Health
from wire.contract import ErrorCode, NodeStatus

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
IDLE = OpenRequests(queued=0, running=0, oldest_wait_s=0.0)
NODE_ID = uuid.UUID("01890000-0000-7000-8000-000000000001")
MISSING = Wait("no node", "No node has big.", "Start one that has it.")


def node(name: str = "rig", status: NodeStatus = NodeStatus.AVAILABLE, **changes: Any) -> NodeHealth:
    """A node that does well, but for ``changes``."""
    values: dict[str, Any] = {
        "freshness": Freshness.FRESH, "age_s": 1.0, "active_requests": 0, "max_concurrent": 1, "models": "", "last_error": "",
        "id": NODE_ID, "model_names": ("tiny",), "op_level": "L2", "policy_version": 1, "could_take_operations": True,
    }  # fmt: skip
    return NodeHealth(name, status, **(values | changes))


def hour(requests: int = 100, failed: int = 0, refused: int = 0) -> Sums:
    return Sums(served=requests - failed - refused, refused=refused, failed=failed)


def facts(*nodes: NodeHealth, slow: SlowFacts | None = None, **changes: Any) -> Facts:
    healthy = SlowFacts(hour(), {"tiny": 5}, PolicyFact(1, NOW + timedelta(days=400)))
    values: dict[str, Any] = {
        "fleet": FleetOverview(nodes or (node(),)), "open_requests": IDLE, "slow": slow or healthy, "now": NOW,
        "gateways": (GatewayHealth("gate:7", NOW, 1.0),),
    }  # fmt: skip
    return Facts(**(values | changes))


def slow(**changes: Any) -> SlowFacts:
    return replace(facts().slow, **changes)


def silent(name: str = "attic") -> NodeHealth:
    heard_at = NOW - timedelta(hours=2)
    return node(name, NodeStatus.OFFLINE, freshness=Freshness.OFFLINE, age_s=7200.0, heard_at=heard_at)


def row(problem: Problem) -> AlertFacts:
    of = problem.object
    return AlertFacts(problem.kind, problem.code or problem.kind, of.type, of.id, of.name, problem.params)


def say(problem: Problem) -> tuple[str, str]:
    return WORDS.describe(row(problem))


def test_nothing_needs_attention_while_all_is_well() -> None:
    assert find_problems(facts()) == []


def budget(percent: int, *, is_hard: bool = False) -> UsedBudget:
    return UsedBudget("tenant", "research", "research", "tokens_per_month", "2026-11", percent, is_hard)


TABLE: dict[str, tuple[Facts, str, Severity]] = {
    "no gateway": (facts(gateways=()), "No gateway runs.", Severity.DOWN),
    "a gateway that fell silent": (facts(gateways=(GatewayHealth("gate:7", NOW, 1.0), GatewayHealth("gate:8",
            NOW - timedelta(minutes=3), 180.0))), "The gateway gate:8 writes no heartbeat.", Severity.IMPAIRED),
    "no node": (facts(fleet=FleetOverview(())), "No node has connected yet.", Severity.DOWN),
    "nodes that only drain": (facts(node(status=NodeStatus.DRAINING)), "No node takes work.", Severity.DOWN),
    "nodes of a provider that is off": (facts(node(is_enabled=False)), "No node takes work.", Severity.DOWN),
    "a model without a node that clients ask for": (facts(slow=slow(allowed={"big": 3}), unserved={"big": MISSING}),
        "No node answers for big, and clients sent 3 requests for it in the last hour.", Severity.DOWN),
    "a model without a node that nobody asks for": (facts(slow=slow(allowed={"big": 0}), unserved={"big": MISSING}),
        "Clients may use big, and no node answers for it.", Severity.NOTICE),
    "failures": (facts(slow=slow(hour=hour(failed=20))), "20 % of the last hour's requests failed.", Severity.IMPAIRED),
    "a node in error": (facts(node(), node("gpu1", NodeStatus.ERROR, last_error="CUDA out of memory")),
        "gpu1 reports an error.", Severity.IMPAIRED),
    "a late node": (facts(node("late", freshness=Freshness.STALE, age_s=12.0)), "late is late.",
        Severity.IMPAIRED), "a silent node": (facts(node(), silent()), "attic is offline.", Severity.IMPAIRED),
    "a node that was never seen": (facts(node(), node("new", NodeStatus.OFFLINE, freshness=Freshness.OFFLINE, age_s=None)),
        "new was never seen.", Severity.IMPAIRED),
    "a URL that does not answer": (facts(node(probe_error="no answer within 3 s")),
        "rig sends heartbeats, but its URL does not answer.", Severity.IMPAIRED),
    "a dead backend": (facts(node(failed=(("tiny", "connection refused"), ))), "tiny failed on rig.", Severity.IMPAIRED),
    "a node without a model": (facts(node(), node("bare", model_names=())), "bare has no model.", Severity.NOTICE),
    "an audit log that does not fit": (facts(node(witness_alarm="two logs")), "rig does not trust the audit log.",
        Severity.DOWN),
    "a refused policy": (facts(node(policy_error="not signed")), "rig refuses what governs it.", Severity.IMPAIRED),
    "two nodes with one name": (facts(node(rival_seen_at=NOW - timedelta(hours=3), rival_address="10.0.0.9")),
        "Two nodes call themselves rig.", Severity.IMPAIRED),
    "Valkey": (facts(slow=slow(unreadable=None)), "Valkey does not answer the control plane.", Severity.IMPAIRED),
    "noise": (facts(slow=slow(unreadable=999)), "Valkey brought 999 messages that Muster could not read.", Severity.IMPAIRED),
    "a clock that is off": (facts(node(clock_skew_ms=90_000)), "The clock of rig is 90 s behind.", Severity.NOTICE),
    "a clock too far off": (facts(node(clock_skew_ms=-300_000)), "The clock of rig is 5 min ahead.", Severity.IMPAIRED),
    "a policy that ends soon": (facts(slow=slow(policy=PolicyFact(4, NOW + timedelta(days=3)))),
        "The approval policy, version 4, expires on 2026-11-24.", Severity.NOTICE),
    "a policy that ended": (facts(slow=slow(policy=PolicyFact(4, NOW))),
        "The approval policy, version 4, expired on 2026-11-21.", Severity.DOWN),
    "a node that trusts no policy": (facts(node(policy_version=0)), "rig trusts no policy.", Severity.NOTICE),
    "a node started without --data": (facts(node(op_level="", policy_version=0)), "rig takes no operations.", Severity.NOTICE),
    "a key that ends soon": (facts(slow=slow(keys=(ExpiringKey(NODE_ID, "ci", NOW + timedelta(days=2)), ))),
        "The API key ci expires on 2026-11-23.", Severity.NOTICE),
    "a CA that ends soon": (facts(slow=slow(authority_ends_at=NOW + timedelta(days=3))),
        "The CA that gives nodes certificates expires on 2026-11-24.", Severity.IMPAIRED),
    "a CA that ended": (facts(slow=slow(authority_ends_at=NOW)),
        "The CA that gives nodes certificates expired on 2026-11-21.", Severity.DOWN),
    "a backup that is old": (facts(slow=slow(backup_at=NOW - timedelta(days=8))),
        "The last backup is of 2026-11-13.", Severity.IMPAIRED),
    "a webhook that takes nothing": (facts(slow=slow(webhooks=(FailingWebhook(1, "chat", 2, NOW, "answered with 404"), ))),
        "The webhook chat does not take 2 messages.", Severity.IMPAIRED),
    "a budget that is nearly used": (facts(slow=slow(budgets=(budget(80), ))),
        "research has used 80 % of its budget for 2026-11.", Severity.NOTICE),
    "a soft budget that is used": (facts(slow=slow(budgets=(budget(100), ))),
        "research has used its whole budget for 2026-11.", Severity.NOTICE),
    "a hard budget that is used": (facts(slow=slow(budgets=(budget(100, is_hard=True), ))),
        "research has used its whole budget for 2026-11.", Severity.IMPAIRED),
    "a node that somebody drained": (facts(node(), node("rig2", NodeStatus.DRAINING, drained_at=NOW - timedelta(hours=2))),
        "rig2 is drained and takes no work.", Severity.NOTICE),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_one_thing_that_is_wrong_is_one_problem_in_words_with_a_name_of_its_kind(case: str) -> None:
    given, what, severity = TABLE[case]
    (problem,) = find_problems(given)
    said, advice = say(problem)
    assert (said, problem.severity) == (what, severity)
    assert advice.endswith(".") or problem.params.get("detail")
    assert "%" not in advice
    assert problem.kind in KINDS


def test_why_a_model_waits_is_said_in_the_language_of_whoever_reads() -> None:
    german = Wait("kein Knoten", "Kein Knoten hat big.", "Starte einen.")
    explained = {"en": {"big": MISSING}, "de": {"big": german}}
    (problem,) = find_problems(facts(slow=slow(allowed={"big": 3}), unserved={"big": MISSING}, explained=explained))
    assert say(problem)[1] == "No node has big. Start one that has it."
    with translation.override("de"):
        assert say(problem)[1] == "Kein Knoten hat big. Starte einen."


def test_what_a_node_says_stands_in_the_advice_and_another_sentence_where_it_says_nothing() -> None:
    (spoken,) = find_problems(facts(node(), node("gpu1", NodeStatus.ERROR, last_error="100% CUDA out of memory")))
    (silent_one,) = find_problems(facts(node(), node("gpu1", NodeStatus.ERROR)))
    assert (say(spoken)[1], say(silent_one)[1]) == ("100% CUDA out of memory", "See its own log.")


def test_every_code_begins_with_a_kind_that_has_a_name() -> None:
    kinds = {kind.partition(".")[0] for kind in KINDS}
    assert {code for code in WORDS_OF if code.partition(".")[0] not in kinds} == set()
    unknown = AlertFacts("node.melted", "node.melted", "node", "1", "rig", {})
    assert WORDS.describe(unknown) == ("node.melted", "")


QUIET = {
    "a few failures of few requests": facts(slow=slow(hour=hour(requests=10, failed=4))),
    "callers' mistakes alone": facts(slow=slow(hour=hour(requests=100, refused=100))),
    "a small share of failures": facts(slow=slow(hour=hour(requests=100, failed=4))),
    "a rival of last week": facts(node(rival_seen_at=NOW - timedelta(days=7))),
    "a clock that is a little off": facts(node(clock_skew_ms=900)),
    "no policy, hence none to trust": facts(node(policy_version=0), slow=slow(policy=None)),
    "a worker of another make, which takes no operations": facts(node(op_level="", could_take_operations=False)),
    "a node that loads its first model": facts(node(), node("bare", model_names=(), is_loading=True)),
    "a model that is being loaded": facts(unserved={"big": Wait("loading", "rig is loading big.", "It starts then.")}),
    "a model that is served meanwhile": facts(unserved={"big": Wait("starting", "rig has big.", "", is_starting=True)}),
    "what a silent node said before": facts(node(), replace(silent(), clock_skew_ms=900_000)),
}


@pytest.mark.parametrize("case", QUIET)
def test_what_is_no_problem_is_not_listed(case: str) -> None:
    assert [problem.kind for problem in find_problems(QUIET[case]) if problem.kind != "node.offline"] == []


@pytest.mark.parametrize(("health", "is_held"), [(Health.SUSPECT, False), (Health.FAILING, True)])
def test_a_late_node_says_what_becomes_of_its_requests(health: Health, is_held: bool) -> None:
    (problem,) = find_problems(facts(node("late", freshness=Freshness.STALE, age_s=12.0, health=health)))
    assert ("Slots of other nodes are held" in say(problem)[1]) is is_held


def test_a_queue_needs_attention_only_when_its_head_has_waited() -> None:
    wait = Wait("nodes full", "Every node is full.", "Add one.")
    assert find_problems(facts(waits=[WaitingModel("tiny", 40, 1.0, wait)])) == []
    problems = find_problems(facts(waits=[WaitingModel("tiny", 3, 9.0, wait), WaitingModel("big", 1, 4.0, wait)]))
    assert [say(problem) for problem in problems] == [
        ("3 requests wait for tiny.", "Every node is full. Add one."),
        ("1 request waits for big.", "Every node is full. Add one."),
    ]
    assert problems[0].since == NOW - timedelta(seconds=9)


BASE = "http://gateway.test:8080"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
IMAGE = {"name": "cat.png", "type": "image/png", "data": "aGVsbG8="}
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


def ask(surface: str = "chat", *, is_draft: bool = False, **fields: Any) -> Ask:
    form = {"surface": surface, "model": "tiny", "prompt": "Hello", **fields}
    return read_ask(json.dumps(form).encode(), is_draft=is_draft)


USAGE = {"stream": True, "stream_options": {"include_usage": True}}
HELLO = {"role": "user", "content": "Hello"}
LIMITED = {"model": "tiny", "temperature": 0.5, "max_tokens": 20}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {**LIMITED, "messages": [{"role": "system", "content": "Be brief."}, HELLO], **USAGE},
    "messages": {**LIMITED, "system": "Be brief.", "messages": [HELLO], "stream": True},
    "responses": {"model": "tiny", "instructions": "Be brief.", "input": "Hello", "temperature": 0.5, "max_output_tokens": 20,
        "stream": True}, "completions": {**LIMITED, "prompt": "Hello", **USAGE},
    "embeddings": {"model": "tiny", "input": "Hello"},
}  # fmt: skip


@pytest.mark.parametrize("surface", BODIES)
def test_one_form_is_said_in_the_words_of_each_surface(surface: str) -> None:
    filled = ask(surface, system="Be brief.", temperature="0.5", max_tokens="20", stream=True)
    assert build_body(filled) == BODIES[surface]


def test_a_picture_goes_where_each_surface_looks_for_it() -> None:
    url = "data:image/png;base64,aGVsbG8="
    assert build_body(ask(image=IMAGE))["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}
    assert build_body(ask("messages", image=IMAGE))["messages"][0]["content"][0] == {"type": "image", "source": source}
    part = {"type": "input_image", "image_url": url, "detail": "auto"}
    assert build_body(ask("responses", image=IMAGE))["input"][0]["content"][1] == part
    assert build_body(ask("completions", image=IMAGE))["prompt"] == "Hello"


FUNCTION = {"name": "weather", "description": "of a city"}
SAID = {
    "chat": {"type": "function", "function": {**FUNCTION, "parameters": SCHEMA}},
    "messages": {**FUNCTION, "input_schema": SCHEMA},
    "responses": {"type": "function", **FUNCTION, "parameters": SCHEMA},
}


@pytest.mark.parametrize("surface", list(SAID))
@pytest.mark.parametrize("written", list(SAID))
def test_a_function_written_for_one_surface_is_said_on_every_other(written: str, surface: str) -> None:
    assert build_body(ask(surface, tools=json.dumps([SAID[written]])))["tools"] == [SAID[surface]]
    kinds: tuple[object, ...] = ([], {}, 1, None)
    for kind in kinds:  # what is none of ours stays as it was written
        tool = {"name": "look_up", "type": kind, "parameters": {"type": "object"}}
        assert build_body(ask(surface, tools=json.dumps([tool])))["tools"] == [tool]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"surface": "speech"}, "surface"), ({"model": " "}, "model"), ({"prompt": "\n"}, "prompt"), ({"temperature": "warm"},
            "temperature"), ({"temperature": "nan"}, "temperature"), ({"temperature": "2.1"}, "temperature"),
        ({"max_tokens": "0"}, "max_tokens"), ({"max_tokens": "1e3"}, "max_tokens"), ({"max_latency_ms": "-1"},
            "max_latency_ms"), ({"priority": "first"}, "priority"), ({"tools": "[{]"}, "tools"), ({"tools": "[1]"}, "tools"),
        *(({"tools": '[{"a":' * depth + "1" + "}]" * depth}, "tools") for depth in (70, 400, 900)),
        ({"image": {**IMAGE, "type": "image/svg+xml"}}, "image"), ({"image": {**IMAGE, "data": ""}}, "image"),
        ({"image": {**IMAGE, "data": "not base64"}}, "image")],
    ids=lambda value: value if isinstance(value, str) else str(next(iter(value.items())))[:40],
)  # fmt: skip
def test_a_field_that_cannot_be_used_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(AskRefused) as caught:
        ask(**{"surface": "chat", **fields})
    assert caught.value.param == param
    assert "not base64" not in caught.value.message


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"surface": 1}', b'{"image": "x"}', b"\xff"])
def test_what_no_page_sends_is_refused_in_words(data: bytes) -> None:
    with pytest.raises(AskRefused, match="cannot be read"):
        read_ask(data)


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_literals_are_read_back_as_the_value(value: Any) -> None:
    assert ast.literal_eval(print_literal(value, PYTHON)) == value
    assert json.loads(print_literal(value, JSON)) == value
    # What a shell takes out of a here-document that it expands: these three, each behind its backslash.
    expanded = re.sub(r"\\([\\$`])", r"\1", print_literal(value, expanding_json("cat.png")))
    assert json.loads(expanded) == value


@pytest.mark.parametrize("surface", list(SURFACES))
def test_code_reads_the_key_from_the_environment_and_never_holds_one(surface: str) -> None:
    code = write_code(ask(surface, key="mst_typed_by_somebody", stream=True), base_url=BASE)
    assert "$MUSTER_API_KEY" in code.curl
    assert 'os.environ["MUSTER_API_KEY"]' in code.python
    assert "process.env.MUSTER_API_KEY" in code.node
    assert "mst_" not in code.curl + code.python + code.node
    assert f"{BASE}{SURFACES[surface].path}" in code.curl  # type: ignore[index]  # a StrEnum is found by its text
    ast.parse(code.python)


@pytest.mark.parametrize("name", ["$(rm -rf ~).png", "a b.png", '"; import os', "-rf", "ä.png", "../up.png", "x" * 80])
def test_the_name_of_a_file_never_becomes_code(name: str) -> None:
    code = write_code(ask(image={**IMAGE, "name": name}), base_url=BASE)
    assert "base64 < image.png |" in code.curl
    assert 'Path("image.png")' in code.python
    assert 'readFile("image.png"' in code.node
    assert name not in code.curl + code.python + code.node


def test_an_ask_is_never_printed_with_what_is_private() -> None:
    printed = repr(ask(key="mst_secret", prompt="my prompt", system="my system", image=IMAGE))
    assert not [word for word in ("mst_secret", "my prompt", "my system", "aGVsbG8=") if word in printed]


@pytest.mark.parametrize(
    "url",
    ["", "gateway:8080", "ftp://gateway", "http://", "http://gateway/v1", "http://gateway?x=1", "http://gateway#x",
        "http://me:secret@gateway", "http://gateway:port", "http://gateway:0", "http://[::1"],
)  # fmt: skip
def test_anything_else_is_none(url: str) -> None:
    assert not is_gateway_url(url)


def test_only_named_headers_reach_a_browser() -> None:
    named = {"x-request-id": "req_1", "x-muster-node": "attic", "retry-after": "3"}
    others = {"set-cookie": "a=1", "location": "http://evil.test", "access-control-allow-origin": "*", "server": "muster"}
    shown = choose_headers({**named, **others, "content-type": "application/json; charset=utf-8"})
    assert shown == {**named, "content-type": "application/json"}


@pytest.mark.parametrize("letter", ["\u202e", "\u2066", "\u200b", "\u2028", "\x9b", "\x7f", "\ufeff"], ids=ascii)
def test_letters_that_hide_or_turn_round_what_stands_there_are_written_out(letter: str) -> None:
    code = write_code(ask(prompt=f"a{letter}b"), base_url=BASE)
    escape = f"a\\u{ord(letter):04x}b"
    for text in (code.curl, code.python, code.node):
        assert escape in text
        assert letter not in text
    body = re.search(r"<<'JSON'\n(.*)\nJSON\n", code.curl, re.DOTALL)
    assert body is not None
    assert json.loads(body[1])["messages"][0]["content"] == f"a{letter}b"


NAME = "MUSTER_A_SETTING"


def test_a_secret_may_stand_in_a_file_which_is_named_when_it_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(f"{NAME}_FILE", str(tmp_path / "secret"))
    with pytest.raises(SettingError, match="secret"):
        read_text(NAME)
    (tmp_path / "secret").write_text("from a file\n")
    assert read_text(NAME) == "from a file"
    monkeypatch.setenv(NAME, "from the environment")
    assert read_text(NAME) == "from the environment"


@pytest.mark.parametrize(
    ("text", "read"),
    [("ten", lambda: read_int(NAME, 1)), ("-1", lambda: read_int(NAME, 1)), ("ten", lambda: read_float(NAME, 1.0)), ("nan",
            lambda: read_float(NAME, 1.0)), ("-0.1", lambda: read_float(NAME, 1.0)), ("maybe", lambda: read_bool(NAME,
            default=True)), ("127.0.0.1,proxy.example", lambda: read_networks(NAME)), ("10.0.0.0/33",
            lambda: read_networks(NAME)), ("10.0.0.1/8", lambda: read_networks(NAME)),
        ("http://id.example.com", lambda: read_issuer(NAME)), ("id.example.com", lambda: read_issuer(NAME)),
        ("root", lambda: read_role(NAME)), ("tenant-admin:", lambda: read_role(NAME)), ("ops", lambda: read_roles(NAME)),
        ("ops=root", lambda: read_roles(NAME)), ("ops=operator:acme", lambda: read_roles(NAME)), ("=viewer", lambda: read_roles(
            NAME)), ('{"ops": ', lambda: read_roles(NAME)), ('{"ops": "root"}', lambda: read_roles(NAME))],
)  # fmt: skip
def test_a_value_that_means_nothing_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, text: str, read: Callable[[], object]
) -> None:
    monkeypatch.setenv(NAME, text)
    with pytest.raises(SettingError, match=NAME):
        read()


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("", {}),
        ("ops=operator, ops=approver,a=b=viewer", {"ops": ("operator", "approver"), "a=b": ("viewer",)}),
        ("leads=tenant-admin:acme", {"leads": ("tenant-admin:acme",)}),
        ('{"a, b": ["viewer", "tenant-viewer:x"]}', {"a, b": ("viewer", "tenant-viewer:x")}),
    ],
)
def test_groups_of_an_issuer_are_mapped_to_roles(
    monkeypatch: pytest.MonkeyPatch, text: str, roles: dict[str, tuple[str, ...]]
) -> None:
    monkeypatch.setenv(NAME, text)
    assert read_roles(NAME) == roles


def test_every_setting_that_cannot_be_used_is_named_at_once_by_the_name_that_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {
        "MUSTER_DEBUG": "perhaps", "MAX_QUEUE_LEN": "many", "LISTEN_ADDR": "0.0.0.0", "WORKER_SECRET": "short",
        "MUSTER_ADMIN_TOKEN": "sixteen letters and spaces", "MUSTER_PROVIDER": "a b", "DATABASE_URL": "mysql://db",
        "MUSTER_LOG_KEY_FILE": str(tmp_path / "key"), "REDIS_URL": "http://x", "MUSTER_TRUSTED_PROXIES": "proxy",
    }  # fmt: skip
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    collect_errors()
    read_bool("MUSTER_DEBUG", default=False)
    read_limits()
    read_database(read_text("DATABASE_URL"))
    read_valkey("REDIS_URL")
    read_networks("MUSTER_TRUSTED_PROXIES")
    assert read_address("MUSTER_LISTEN", "127.0.0.1:8080") == ("127.0.0.1", 8080)
    assert read_secret("MUSTER_WORKER_SECRET") == read_secret("MUSTER_ADMIN_TOKEN") == read_text("MUSTER_LOG_KEY") == ""
    read_name("MUSTER_PROVIDER", "local")
    with pytest.raises(SettingError, match=f"{len(given)} settings cannot be used") as refused:
        raise_errors()
    said = str(refused.value).splitlines()[1:]
    assert {line.split()[0].strip(":") for line in said} == set(given)
    assert "MAX_QUEUE_LEN (read as MUSTER_MAX_QUEUE_LEN) must be a whole number, not 'many'" in str(refused.value)
    for secret in (given["WORKER_SECRET"], given["MUSTER_ADMIN_TOKEN"]):
        assert secret not in str(refused.value)
    with pytest.raises(SettingError, match="MUSTER_DEBUG"):  # what is read later is refused where it is read
        read_bool("MUSTER_DEBUG", default=False)


def test_an_address_to_listen_on_may_be_of_either_kind_and_no_bound_of_a_queue_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, address in (("0.0.0.0:80", ("0.0.0.0", 80)), ("[::1]:8080", ("::1", 8080)), ("host:0", ("host", 0))):
        monkeypatch.setenv("LISTEN_ADDR", text)
        assert read_address("MUSTER_LISTEN", "127.0.0.1:1") == address
    monkeypatch.setenv("MAX_QUEUE_LEN", "0")
    monkeypatch.setenv("QUEUE_TIMEOUT_SECS", "7")
    monkeypatch.setenv("REQUEST_TIMEOUT_SECS", "0")
    bounds = read_limits().gateway
    assert (bounds.max_queue, bounds.queue_s, bounds.request_s) == (1_000_000, 7.0, 7 * 86_400.0)


@pytest.mark.parametrize(
    ("names", "named", "mode"),
    [
        (("127.0.0.1",), "", "near"), (("localhost", "127.0.0.1"), "", "near"), (("::1",), "", "near"),
        (("127.0.0.1",), "127.0.0.1", "admitted"), (("0.0.0.0",), "10.0.0.1, 0.0.0.0", "admitted"), (("0.0.0.0",), "", None),
        (("127.0.0.1", "0.0.0.0"), "", None), (("10.0.0.1",), "0.0.0.0", None),
    ],
)  # fmt: skip
def test_requests_without_a_key_are_let_in_from_elsewhere_only_at_an_address_that_is_named(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], named: str, mode: str | None
) -> None:
    monkeypatch.setenv("MUSTER_KEYLESS_ADDRESSES", named)
    assert read_keyless(*names) == "refused"
    monkeypatch.setenv("MODELRELAY_REQUIRE_API_KEYS", "false")
    if mode is not None:
        assert read_keyless(*names) == mode
        return
    with pytest.raises(
        SettingError, match=r"MODELRELAY_REQUIRE_API_KEYS .*MUSTER_KEYLESS_ADDRESSES=.* MUSTER_REQUIRE_API_KEYS=on"
    ):
        read_keyless(*names)


BOUNDS = {
    "connect_timeout": "5", "keepalives_idle": "5", "keepalives_interval": "2", "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}  # fmt: skip


def test_a_database_is_named_by_host_or_by_socket() -> None:
    over_tcp = read_database("postgresql://u%40x:p%3A@db.example:6432/muster?sslmode=require")
    over_socket = read_database("postgresql://postgres@/muster?host=/run/pg&port=5433")
    assert (over_tcp["HOST"], over_tcp["PORT"], over_tcp["USER"], over_tcp["PASSWORD"]) == ("db.example", "6432", "u@x", "p:")
    assert over_tcp["OPTIONS"] == {**BOUNDS, "sslmode": "require"}
    assert (over_socket["HOST"], over_socket["PORT"], over_socket["NAME"]) == ("/run/pg", "5433", "muster")


def test_a_log_level_has_its_usual_words_in_any_case_and_another_is_answered_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"": "INFO", "warn": "WARNING", "WARNING": "WARNING", "Trace": "DEBUG", " debug ": "DEBUG", "CRITICAL": "CRITICAL"}
    for text, level in words.items():
        monkeypatch.setenv(NAME, text)
        assert read_log_level(NAME) == level
    monkeypatch.setenv(NAME, "verbose")
    with pytest.raises(SettingError, match=f"{NAME} must be one of {', '.join(LOG_LEVELS)}, not 'verbose'"):
        read_log_level(NAME)


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [(InvalidValue("limit must be a number.", param="limit"), 400, ErrorCode.BAD_REQUEST, "limit"), (NameTaken("taken",
            param="name"), 409, ErrorCode.BAD_REQUEST, "name"), (InvalidAdminToken("no"), 401, ErrorCode.INVALID_ADMIN_TOKEN,
            None), (NodeNotFound("no"), 404, ErrorCode.BAD_REQUEST, None), (exceptions.NotAuthenticated(), 401,
            ErrorCode.INVALID_ADMIN_TOKEN, None), (exceptions.ValidationError({"node": {"name": ["too long"]}}), 400,
            ErrorCode.BAD_REQUEST, "node.name"), (exceptions.ParseError("JSON parse error"), 400, ErrorCode.BAD_REQUEST, None),
        (exceptions.UnsupportedMediaType("text/plain"), 415, ErrorCode.BAD_REQUEST, None), (exceptions.MethodNotAllowed("PUT"),
            405, ErrorCode.BAD_REQUEST, None), (exceptions.NotFound(), 404, ErrorCode.NOT_FOUND, None), (Http404(), 404,
            ErrorCode.NOT_FOUND, None), (PermissionDenied(), 403, ErrorCode.INVALID_ADMIN_TOKEN, None), (RequestDataTooBig(),
            413, ErrorCode.BODY_TOO_LARGE, None), (exceptions.Throttled(wait=3), 429, ErrorCode.RATE_LIMITED, None),
        (exceptions.APIException("broken"), 500, ErrorCode.INTERNAL_ERROR, None),
        (OperationalError("the server closed the connection"), 503, ErrorCode.INTERNAL_ERROR, None),
        (InterfaceError("the connection is closed"), 503, ErrorCode.INTERNAL_ERROR, None)],
)  # fmt: skip
def test_every_known_error_has_its_status_code_and_parameter(
    error: Exception, status: int, code: ErrorCode, param: str | None
) -> None:
    known = describe_error(error)
    assert known is not None
    assert (known.status, known.code, known.param) == (status, code, param)
    assert set(known.body()["error"]) == {"code", "message", "retryable", "type", "param"}


def test_a_defect_of_ours_is_not_described_to_the_caller() -> None:
    assert describe_error(ZeroDivisionError("division by zero")) is None


@pytest.mark.parametrize(("method", "is_safe"), [("GET", True), ("HEAD", True), ("POST", False), ("DELETE", False)])
def test_without_the_database_only_what_changes_nothing_may_blindly_be_sent_again(method: str, is_safe: bool) -> None:
    known = describe_error(OperationalError("gone"), method=method)
    assert known is not None
    assert known.retryable is is_safe
    assert ("Nothing was changed" in known.message, "may or may not have been done" in known.message) == (is_safe, not is_safe)
    assert "gone" not in known.message


def parameters(**options: str) -> tuple[object, object]:
    """The options and the time limit of a connection whose DATABASE_URL has these."""
    settings = {
        "NAME": "muster", "USER": "", "PASSWORD": "", "HOST": "", "PORT": "", "OPTIONS": options, "CONN_MAX_AGE": 0,
        "CONN_HEALTH_CHECKS": False, "AUTOCOMMIT": True, "TIME_ZONE": None, "ATOMIC_REQUESTS": False,
    }  # fmt: skip
    found = DatabaseWrapper(settings).get_connection_params()
    return found.get("options"), found.get("connect_timeout")


@pytest.fixture(autouse=True)
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_of_process", [])


def test_without_a_bound_the_url_alone_decides() -> None:
    assert parameters(connect_timeout="5") == (None, "5")


@pytest.mark.parametrize(("silence_s", "statement_ms", "connect_s"), [(2.0, 30_000, 2), (10.0, 30_000, 5), (300.0, 300_000, 5)])
def test_the_server_ends_statements_that_the_process_would_give_up(silence_s: float, statement_ms: int, connect_s: int) -> None:
    limit_process(silence_s)
    assert parameters(connect_timeout="5", options="-c lock_timeout=9") == (
        f"-c lock_timeout=9 -c statement_timeout={statement_ms}",
        connect_s,
    )


def test_a_thread_with_an_end_binds_the_server_to_what_is_left() -> None:
    limit_process(30.0)
    with limit_waits(WaitLimit(silence_s=5.0, ends_at=time.monotonic() - 1)):
        assert parameters() == ("-c statement_timeout=1", 2)


@pytest.mark.parametrize("given", ["", "0", "-1", "soon"])
def test_a_url_without_a_usable_limit_for_connecting_gets_ours(given: str) -> None:
    limit_process(7.0)
    assert parameters(**({"connect_timeout": given} if given else {}))[1] == 7
