"""What a box says of itself is cut to size, whatever it says; and the API paths, contexts and engines that follow from it."""

from __future__ import annotations

import json
from typing import Any  # JSON

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.limits import NodeLimits, limits
from nodes.session import (
    GovernanceChanged,
    OperationReported,
    Registered,
    ServerSession,
    TelemetryArrived,
    find_contexts,
    find_endpoints,
    find_engines,
    read_capabilities,
    read_contexts,
    read_engines,
)
from nodes.session.reports import clean_telemetry
from tests.fakes.examples import examples
from wire import bridge
from wire.bridge import GpuInfo, MemoryInfo, ModelFacts, ProtocolError, ReplicaInfo, Telemetry

CHAT, EMBED = "/v1/chat/completions", "/v1/embeddings"
MEGABYTE = 1024 * 1024
LIMITS: dict[str, dict[str, Any]] = {
    "gguf_n_ctx": {"kind": "integer", "minimum": 1, "step": 1, "unit": "tokens", "default": None},
    "gguf_type_k": {"kind": "enum", "allowed_values": ["f16", "q8_0"], "default": "f16"},
}
FACTS = ModelFacts(
    name="m", backend="gguf", state="loaded", replicas=1, loaded_replicas=1, replica_max=4, target_inflight=2,
    configured_target_inflight=3, estimate_mb=700, estimate_replicas=1, estimate_source="observed_load_delta",
    load_constraints=LIMITS,
)  # fmt: skip


def cleaned(**fields: object) -> Telemetry:
    message = Telemetry(**fields)  # type: ignore[arg-type]  # names of its fields
    clean_telemetry(message)
    return message


def loaded(model: str, *endpoints: str, state: str = "loaded") -> ReplicaInfo:
    return ReplicaInfo(model=model, state=state, endpoints=list(endpoints))


def facts_of(telemetry: Telemetry) -> list[ModelFacts]:
    assert telemetry.memory is not None
    assert telemetry.memory.models is not None
    return telemetry.memory.models


# cutting


def test_a_modest_report_stays_as_it_is() -> None:
    replica = ReplicaInfo(
        model="m", state="loading", engine="vllm", detail="weights", progress=0.5, eta_s=9.0, endpoints=[CHAT],
        context_tokens=4096, kept=True, gave_up_ms=7,
    )  # fmt: skip
    said = {
        "gpus": [GpuInfo(index=1, name="L4", memory_total_mb=9, memory_used_mb=3, temperature_c=61.5, power_w=70.0)],
        "replicas": [replica],
        "available": ["a", "b"],
        "memory": MemoryInfo(kind="host", total_mb=9, used_mb=3, weights_mb=2, kv_mb=1, models=[FACTS]),
        "queue_depth": 3,
        "avg_wait_ms": 40,
        "last_error": "CUDA",
    }
    assert cleaned(**said) == Telemetry(**said)  # type: ignore[arg-type]  # names of its fields


def test_a_flood_is_cut_to_what_can_be_kept() -> None:
    text, most = "x" * 65_536, limits().nodes
    paths = ["/" + text, *[f"/{n}" for n in range(99)]]
    replica = ReplicaInfo(model=text, state=text, engine=text, detail=text, endpoints=paths)
    message = cleaned(
        gpus=[GpuInfo(index=0, name=text)] * 2_000,
        replicas=[replica] * 2_000,
        available=[f"{number}{text}" for number in range(600)],
        last_error=text,
        memory=MemoryInfo(kind=text),
    )
    kept = (len(message.gpus), len(message.replicas), len(message.available))
    assert kept == (most.report_gpus, most.report_replicas, most.report_available)
    assert len(message.replicas[0].endpoints) <= most.report_endpoints
    assert len(msgspec.json.encode(message)) < 512 * 1024
    session = registered()[0]
    (effect,) = session.receive_text(bridge.encode_message(Telemetry(replicas=[loaded("m")] * 10_000)))
    assert isinstance(effect, TelemetryArrived)
    assert len(effect.telemetry.replicas) == most.report_replicas, "cut before anybody sees it"


@pytest.mark.parametrize("number", [-1, -(10**40), 10**40])
def test_numbers_are_brought_into_their_range(number: int) -> None:
    most, is_high = limits().nodes, number > 0
    gpu = GpuInfo(index=number, name="g", memory_total_mb=number, memory_used_mb=number, utilization_percent=float(number))
    replica = ReplicaInfo(
        model="m", state="s", slots=number, active=number, progress=float(number), memory_mb=number, context_tokens=number,
        gave_up_ms=number,
    )  # fmt: skip
    message = cleaned(gpus=[gpu], replicas=[replica], queue_depth=number, avg_wait_ms=number, current_load=number)
    found = message.replicas[0]
    assert (message.gpus[0].memory_total_mb, found.memory_mb) == ((most.report_mb,) * 2 if is_high else (0, 0))
    assert (message.gpus[0].utilization_percent, found.progress) == ((100.0, 1.0) if is_high else (0.0, 0.0))
    assert found.slots == (most.report_load if is_high else 0)
    assert found.context_tokens == (most.report_context_tokens if is_high else None)
    assert (message.avg_wait_ms or 0) < 2**31
    assert most.report_gpus * most.report_mb < 2**31, "the memory of all GPUs together fits its column"
    assert (found.gave_up_ms or 0) <= 10**15


@pytest.mark.parametrize("text", ["a\x00b", "a\nb", "a\u202eb", "\x1b[31m"])
def test_text_becomes_printable_and_only_paths_are_taken_for_endpoints(text: str) -> None:
    replica = ReplicaInfo(
        model=text, state=text, detail=text, endpoints=["v1/chat", "", "/v1/x\n", CHAT, CHAT, "/" + "x" * 200]
    )
    message = cleaned(replicas=[replica], last_error=text, available=[text])
    said = [message.replicas[0].model, message.replicas[0].detail, message.last_error or "", *message.available]
    assert all(word.isprintable() and word for word in said)
    assert message.replicas[0].endpoints == [CHAT]


@examples(15)
@given(st.lists(st.tuples(st.text(), st.text(), st.integers() | st.none(), st.floats(allow_nan=False) | st.none()), max_size=8))
def test_whatever_is_said_can_be_written_as_json_for_postgresql(rows: list[tuple[str, str, int | None, float | None]]) -> None:
    replicas = [ReplicaInfo(model=m, state=s, memory_mb=mb, progress=p, eta_s=p, detail=m) for m, s, mb, p in rows]
    message = cleaned(replicas=replicas, available=[row[0] for row in rows])
    text = json.dumps(msgspec.to_builtins(message), allow_nan=False)
    assert "\\u0000" not in text
    text.encode()


def test_what_a_load_may_set_is_cut_to_size() -> None:
    most = limits().nodes
    wild: dict[str, dict[str, Any]] = {
        "x" * 1000: {"a": "\x00" * 1000, "b": [1, "w" * 1000, None] * 100, "c": {"deep": {}}, "d": 1e308 * 10, "e": 2**80},
        **{f"f{number}": dict.fromkeys(map(str, range(100)), 1) for number in range(100)},
    }
    facts = [ModelFacts(name="n" * 1000, estimate_mb=-5, replicas=2**70, load_constraints=wild)] * 300
    kept = facts_of(cleaned(memory=MemoryInfo(models=facts)))
    assert len(kept) == most.report_models
    (name, said), *others = kept[0].load_constraints.items()
    assert (len(kept[0].name), kept[0].estimate_mb, len(name), len(others)) == (200, 0, 40, most.report_constraints - 1)
    assert {key: said[key] for key in "cde"} == {"c": None, "d": None, "e": None}
    assert all(len(word) <= 40 for word in said["b"])
    assert all(len(inner) <= most.report_constraints for _, inner in others)
    names = [str(number) for number in range(most.report_constraints)]
    long = {name: dict.fromkeys(names, "w" * 200) for name in names}
    assert facts_of(cleaned(memory=MemoryInfo(models=[ModelFacts(name="n", load_constraints=long)])))[0].load_constraints == {}
    assert len(msgspec.json.encode(kept)) < MEGABYTE


# paths, contexts, engines


@pytest.mark.parametrize(
    ("replicas", "registered", "found"),
    [
        ([loaded("a", EMBED)], [CHAT], {"a": {EMBED}, "b": {CHAT}}),
        ([loaded("a")], [], {}),
        ([], [], {}),
        ([loaded("a", EMBED), loaded("a", CHAT)], [], {"a": {EMBED, CHAT}}),
        ([loaded("a", EMBED), loaded("a")], [], {}),
        ([loaded("a", EMBED), loaded("a")], [CHAT], {"a": {EMBED, CHAT}, "b": {CHAT}}),
        ([loaded("a", EMBED, state="failed")], [CHAT], {"a": {CHAT}, "b": {CHAT}}),
        ([loaded("a", EMBED, state="unloaded")], [CHAT], {"a": {CHAT}, "b": {CHAT}}),
    ],
)
def test_a_model_is_asked_on_the_paths_that_its_copies_name_or_else_its_box(
    replicas: list[ReplicaInfo], registered: list[str], found: dict[str, set[str]]
) -> None:
    assert find_endpoints(["a", "b"], replicas=replicas, registered=registered) == found


def test_the_smallest_context_and_the_engines_of_the_replicas_that_are_there_count_and_are_found_again() -> None:
    told = [
        ("a", "llamacpp", "loaded", 8192),
        ("a", "vllm", "loading", 4096),
        ("a", "tgi", "failed", 1),
        ("b", "", "loaded", None),
    ]
    replicas = [ReplicaInfo(model=m, engine=engine, state=state, context_tokens=size) for m, engine, state, size in told]
    stored = json.loads(msgspec.json.encode(replicas))
    assert find_contexts(replicas) == read_contexts(stored) == {"a": 4096}
    assert find_engines(replicas) == read_engines(stored) == {"a": {"llamacpp", "vllm"}}
    wrong = {"model": "a", "state": "loaded", "context_tokens": "x", "engine": 7}
    odd_ones: tuple[object, ...] = (None, {}, [7], [{"model": "a"}], [wrong])
    for odd in odd_ones:
        assert (read_contexts(odd), read_engines(odd)) == ({}, {})
    assert b"context_tokens" not in msgspec.json.encode(loaded("m"))


# the model-runner API


COPIES = [{"id": "a", "replicas": 2, "gpuMemoryMB": 9.0}]


@pytest.mark.parametrize(
    ("answer", "names", "replicas", "ailment"),
    [
        ({"models": {}}, (), [], ""),
        ({"models": {"loaded": [{"id": " "}, {"id": "x" * 201}, {"id": "a"}]}}, ("a",), None, ""),
        ({"models": {"failed": [{"id": "a", "reason": "out of memory"}]}}, (), [("a", "failed", None)], ""),
        ({"models": {"loaded": COPIES}}, ("a",), [("a", "loaded", 4), ("a", "loaded", 4)], ""),
        ({"models": {}, "health": "un\nwell" * 50}, (), [], ("un well" * 50)[:40]),
        ({"models": {}, "health": ""}, (), [], "unknown"),
        ({"models": {"loaded": [{"id": "a", "replicas": 1e300, "gpuMemoryMB": -1}] * 999}}, ("a",), None, ""),
    ],
)
def test_capabilities_are_cut_to_what_can_be_kept(
    answer: dict[str, Any], names: tuple[str, ...], replicas: list[tuple[str, str, int | None]] | None, ailment: str
) -> None:
    said = read_capabilities(json.dumps(answer).encode(), policy=NodeLimits())
    assert (said.models, said.ailment) == (names, ailment)
    assert len(said.telemetry.replicas) <= limits().nodes.report_replicas
    if replicas is not None:
        assert [(one.model, one.state, one.memory_mb) for one in said.telemetry.replicas] == replicas


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "truncated"),
        (b"{}", "models"),
        (b'{"models": {"loaded": [{"id": 7}]}}', r"\$\.models\.loaded\[0\]\.id"),
        (b'{"models": {}, "queue": {"depth": "many"}}', r"\$\.queue\.depth"),
        (b"[" * 100_000, "object"),
    ],
    ids=["empty", "no models", "id", "depth", "deep"],
)
def test_capabilities_that_cannot_be_read_are_refused_with_the_member_that_is_wrong(body: bytes, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        read_capabilities(body, policy=NodeLimits())


# operations and how a node decides about them, of muster v1 alone

STATUS: dict[str, Any] = {"op_id": "op-1", "use": 1, "state": "running"}
GOVERNANCE = bridge.BoxGovernance(level="L2", runner_id="rig#abc", public_key="AAAA", op_keys={"k1": "c2VjcmV0"}, clock_ms=5)
RESULT_BYTES, RECEIPT_CHARS = limits().nodes.status_result_bytes, limits().nodes.status_receipt_chars


def registered(
    version: str = bridge.MUSTER_V1, governance: bridge.BoxGovernance | None = None
) -> tuple[ServerSession, Registered]:
    session = ServerSession(NodeLimits())
    hello = bridge.Register(worker_name="rig", models=["m"], protocol_version=version, governance=governance)
    (effect,) = session.receive_text(bridge.encode_message(hello))
    assert isinstance(effect, Registered)
    return session, effect


def reported(report: bridge.GovernanceReport) -> bridge.GovernanceReport:
    """Send a report and return what arrives of it."""
    (effect,) = registered()[0].receive_text(bridge.encode_message(report))
    assert isinstance(effect, GovernanceChanged)
    return effect.report


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        ({"stage": "loading", "fraction": 0.5, "eta_s": 3.0}, {"stage": "loading", "fraction": 0.5, "eta_s": 3.0}),
        ({"stage": "s" * 999, "code": "c" * 999}, {"stage": "s" * 200, "code": "c" * 80}),
        ({"message": "a\x00b\n" + "m" * 999}, {"message": "a b " + "m" * 496}),
        ({"op_id": "x" * 65}, {"op_id": ""}),
        ({"op_id": "a\nb"}, {"op_id": ""}),
        ({"use": 0}, {"use": 0}),
        ({"use": -1}, {"use": 0}),
        ({"use": 2**40}, {"use": 0}),
        ({"state": "approved"}, {"state": ""}),
        ({"fraction": 7.0, "eta_s": -3.0}, {"fraction": 1.0, "eta_s": 0.0}),
        ({"result": {"a": "x" * (RESULT_BYTES - 9)}}, {"result": {"a": "x" * (RESULT_BYTES - 9)}}),
        ({"result": {"a": "x" * RESULT_BYTES}}, {"result": None}),
        ({"result": {"a": "x\x00y"}}, {"result": None}),
        ({"result": {"a\x00": 1}}, {"result": None}),
        ({"receipt": "r" * RECEIPT_CHARS}, {"receipt": "r" * RECEIPT_CHARS}),
        ({"receipt": "r" * (RECEIPT_CHARS + 1)}, {"receipt": ""}),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_a_status_is_cut_to_what_can_be_kept_and_what_is_left_out_is_said(
    sent: dict[str, Any], arrives: dict[str, Any]
) -> None:
    (effect,) = registered()[0].receive_text(bridge.encode_message(bridge.OpStatus(**{**STATUS, **sent})))
    assert isinstance(effect, OperationReported)
    if arrives.get("result", sent) is None:
        assert set(effect.status.result) == {"omitted"}
        return
    assert effect.status == bridge.OpStatus(**{**STATUS, **arrives})


def test_a_bridge_v1_box_may_not_speak_of_operations_and_has_no_governance() -> None:
    for message in (bridge.OpStatus(**STATUS), bridge.GovernanceReport(governance=GOVERNANCE)):
        session, _ = registered(bridge.BRIDGE_V1)
        with pytest.raises(ProtocolError):
            session.receive_text(bridge.encode_message(message))
    assert registered(bridge.BRIDGE_V1, GOVERNANCE)[1].message.governance is None
    assert registered(bridge.MUSTER_V1, GOVERNANCE)[1].message.governance == GOVERNANCE


def test_a_report_is_cut_to_size_and_of_too_many_keys_the_newest_are_kept() -> None:
    keys = {f"k{number}": "c2VjcmV0" for number in range(20)}
    said = bridge.BoxGovernance(
        level="L9", runner_id="r" * 201, public_key="p" * 401, op_keys={"": "x", "k" * 65: "x", "long": "s" * 129, **keys},
        policy_version=2**40, policy_error="e" * 999, witness_size=-1, clock_ms=2**60,
    )  # fmt: skip
    report = reported(bridge.GovernanceReport(governance=said, witness_signature="s" * 129, witness_alarm="a" * 999))
    kept = report.governance
    assert (kept.level, kept.runner_id, kept.public_key) == ("", "", "")
    assert list(kept.op_keys) == list(keys)[-limits().nodes.op_keys :]
    assert (kept.policy_version, kept.witness_size, len(kept.policy_error)) == (2**31 - 1, 0, 300)
    assert (report.witness_signature, len(report.witness_alarm)) == ("", 300)


@pytest.mark.parametrize(
    ("note", "kept"), [("a\n1\n\n\u2014 a b\n", True), ("x" * 8193, False), ("a\x00", False), ("a\r\n", False)]
)
def test_a_note_keeps_its_lines_and_nothing_that_is_none(note: str, kept: bool) -> None:
    assert reported(bridge.GovernanceReport(governance=GOVERNANCE, witness_note=note)).witness_note == (note if kept else "")
