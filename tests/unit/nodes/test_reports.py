"""What a box says of itself is cut to size, whatever it says; and the API paths that follow from it."""

from __future__ import annotations

import json
from typing import Any

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
    read_endpoints,
    read_engines,
    store_endpoints,
)
from nodes.session.reports import clean_register, clean_telemetry
from tests.fakes.examples import examples
from wire import bridge
from wire.bridge import GpuInfo, MemoryInfo, ModelFacts, ProtocolError, ReplicaInfo, Telemetry

CHAT, EMBED = "/v1/chat/completions", "/v1/embeddings"
MEGABYTE = 1024 * 1024


def cleaned(**fields: object) -> Telemetry:
    message = Telemetry(**fields)  # type: ignore[arg-type]  # names of its fields
    clean_telemetry(message)
    return message


def loaded(model: str, *endpoints: str, state: str = "loaded") -> ReplicaInfo:
    return ReplicaInfo(model=model, state=state, endpoints=list(endpoints))


# cutting


def test_a_modest_report_stays_as_it_is() -> None:
    said = {
        "gpus": [GpuInfo(index=1, name="L4", memory_total_mb=9, memory_used_mb=3, temperature_c=61.5, power_w=70.0)],
        "replicas": [
            ReplicaInfo(
                model="m",
                state="loading",
                engine="vllm",
                detail="weights",
                progress=0.5,
                eta_s=9.0,
                endpoints=[CHAT],
                context_tokens=4096,
            )
        ],
        "available": ["a", "b"],
        "memory": MemoryInfo(kind="host", total_mb=9, used_mb=3, weights_mb=2, kv_mb=1),
        "queue_depth": 3,
        "avg_wait_ms": 40,
        "last_error": "CUDA",
    }
    assert cleaned(**said) == Telemetry(**said)  # type: ignore[arg-type]  # names of its fields


def test_a_flood_is_cut_to_what_can_be_kept() -> None:
    text = "x" * 65_536
    replica = ReplicaInfo(
        model=text, state=text, engine=text, detail=text, endpoints=["/" + text, *[f"/{n}" for n in range(99)]]
    )
    message = cleaned(
        gpus=[GpuInfo(index=0, name=text)] * 2_000,
        replicas=[replica] * 2_000,
        available=[f"{number}{text}" for number in range(600)],
        last_error=text,
        memory=MemoryInfo(kind=text),
    )
    assert (len(message.gpus), len(message.replicas), len(message.available)) == (
        limits().nodes.report_gpus,
        limits().nodes.report_replicas,
        limits().nodes.report_available,
    )
    assert len(message.replicas[0].endpoints) <= limits().nodes.report_endpoints
    assert len(msgspec.json.encode(message)) < 512 * 1024


@pytest.mark.parametrize("number", [-1, -(10**40), 10**40])
def test_numbers_are_brought_into_their_range(number: int) -> None:
    gpu = GpuInfo(index=number, name="g", memory_total_mb=number, memory_used_mb=number, utilization_percent=float(number))
    replica = ReplicaInfo(
        model="m", state="s", slots=number, active=number, progress=float(number), memory_mb=number, context_tokens=number
    )
    message = cleaned(gpus=[gpu], replicas=[replica], queue_depth=number, avg_wait_ms=number, current_load=number)
    top = limits().nodes.report_mb if number > 0 else 0
    assert (message.gpus[0].memory_total_mb, message.replicas[0].memory_mb) == (top, top)
    assert message.gpus[0].utilization_percent == (100.0 if number > 0 else 0.0)
    assert message.replicas[0].progress == (1.0 if number > 0 else 0.0)
    assert message.replicas[0].slots == (limits().nodes.report_load if number > 0 else 0)
    assert message.replicas[0].context_tokens == (limits().nodes.report_context_tokens if number > 0 else None)
    assert (message.avg_wait_ms or 0) < 2**31


def test_the_memory_of_all_gpus_together_fits_its_column() -> None:
    assert limits().nodes.report_gpus * limits().nodes.report_mb < 2**31


@pytest.mark.parametrize("text", ["a\x00b", "a\nb", "a\u202eb", "\x1b[31m"])
def test_text_becomes_printable(text: str) -> None:
    message = cleaned(replicas=[ReplicaInfo(model=text, state=text, detail=text)], last_error=text, available=[text])
    said = [message.replicas[0].model, message.replicas[0].detail, message.last_error or "", *message.available]
    assert all(word.isprintable() and word for word in said)


def test_only_paths_are_taken_for_endpoints() -> None:
    replica = ReplicaInfo(model="m", state="loaded", endpoints=["v1/chat", "", "/v1/x\n", CHAT, CHAT, "/" + "x" * 200])
    assert cleaned(replicas=[replica]).replicas[0].endpoints == [CHAT]


def test_a_bridge_worker_says_nothing_of_replicas() -> None:
    message = bridge.Register(endpoints=[CHAT], replicas=[loaded("m")], available=["x"], memory=MemoryInfo())
    clean_register(message)
    assert (message.endpoints, message.replicas, message.available, message.memory) == ([], [], [], None)


@examples(25)
@given(st.lists(st.tuples(st.text(), st.text(), st.integers() | st.none(), st.floats(allow_nan=False) | st.none()), max_size=8))
def test_whatever_is_said_can_be_written_as_json_for_postgresql(rows: list[tuple[str, str, int | None, float | None]]) -> None:
    replicas = [ReplicaInfo(model=m, state=s, memory_mb=mb, progress=p, eta_s=p, detail=m) for m, s, mb, p in rows]
    message = cleaned(replicas=replicas, available=[row[0] for row in rows])
    text = json.dumps(msgspec.to_builtins(message), allow_nan=False)
    assert "\\u0000" not in text
    text.encode()


def test_that_a_model_is_kept_and_when_it_was_given_up_arrives() -> None:
    told = [
        ReplicaInfo(model="m", state="failed", kept=True, gave_up_ms=7),
        ReplicaInfo(model="n", state="failed", gave_up_ms=10**30),
    ]
    found = [(info.kept, info.gave_up_ms) for info in cleaned(replicas=told).replicas]
    assert found == [(True, 7), (False, 10**15)]


def test_telemetry_is_cut_before_anybody_sees_it() -> None:
    session = ServerSession(NodeLimits())
    session.receive_text(bridge.encode_message(bridge.Register(models=["m"], protocol_version=bridge.MUSTER_V1)))
    frame = bridge.encode_message(Telemetry(replicas=[loaded("m")] * 10_000))
    (effect,) = session.receive_text(frame)
    assert isinstance(effect, TelemetryArrived)
    assert len(effect.telemetry.replicas) == limits().nodes.report_replicas


# API paths


def test_a_replica_that_names_its_paths_is_asked_on_those_alone() -> None:
    found = find_endpoints(["a", "b"], replicas=[loaded("a", EMBED)], registered=[CHAT])
    assert found == {"a": {EMBED}, "b": {CHAT}}


def test_without_any_word_a_box_is_asked_anything() -> None:
    assert find_endpoints(["a"], replicas=[loaded("a")], registered=[]) == {}
    assert find_endpoints(["a"], replicas=[], registered=[]) == {}


def test_copies_of_a_model_answer_what_one_of_them_answers() -> None:
    assert find_endpoints(["a"], replicas=[loaded("a", EMBED), loaded("a", CHAT)], registered=[]) == {"a": {EMBED, CHAT}}
    assert find_endpoints(["a"], replicas=[loaded("a", EMBED), loaded("a")], registered=[]) == {}
    assert find_endpoints(["a"], replicas=[loaded("a", EMBED), loaded("a")], registered=[CHAT]) == {"a": {EMBED, CHAT}}


@pytest.mark.parametrize("state", ["failed", "unloaded"])
def test_copies_that_are_gone_say_nothing(state: str) -> None:
    assert find_endpoints(["a"], replicas=[loaded("a", EMBED, state=state)], registered=[CHAT]) == {"a": {CHAT}}


def test_paths_are_stored_in_order_and_read_back() -> None:
    paths = {"b": frozenset({EMBED, CHAT}), "a": frozenset({CHAT})}
    stored = store_endpoints(paths)
    assert json.dumps(stored) == json.dumps({"a": [CHAT], "b": [CHAT, EMBED]})
    assert read_endpoints(stored) == paths
    assert read_endpoints(None) == {}


# contexts


def with_context(model: str, tokens: int | None, *, state: str = "loaded") -> ReplicaInfo:
    return ReplicaInfo(model=model, state=state, context_tokens=tokens)


def test_a_request_must_fit_the_smallest_replica_that_is_there() -> None:
    replicas = [with_context("a", 8192), with_context("a", 4096), with_context("a", 1, state="failed"), with_context("b", None)]
    assert find_contexts(replicas) == {"a": 4096}


def test_contexts_are_found_again_in_what_was_stored() -> None:
    replicas = [with_context("a", 8192), with_context("b", None)]
    assert read_contexts(json.loads(msgspec.json.encode(replicas))) == {"a": 8192}


@pytest.mark.parametrize(
    "stored", [None, {}, [7], [{"model": "a"}], [{"model": "a", "state": "loaded", "context_tokens": "x"}]]
)
def test_replicas_that_cannot_be_read_have_no_contexts(stored: object) -> None:
    assert read_contexts(stored) == {}


def test_a_model_has_the_engines_of_the_replicas_that_are_there() -> None:
    said = [("a", "llamacpp", "loaded"), ("a", "vllm", "loading"), ("a", "tgi", "failed"), ("b", "", "loaded")]
    replicas = [ReplicaInfo(model=model, engine=engine, state=state) for model, engine, state in said]
    assert find_engines(replicas) == {"a": {"llamacpp", "vllm"}}
    assert read_engines(json.loads(msgspec.json.encode(replicas))) == {"a": {"llamacpp", "vllm"}}
    assert read_engines([{"model": "a"}]) == {}


def test_a_box_of_before_says_nothing_of_contexts_and_one_that_knows_none_sends_nothing() -> None:
    assert b"context_tokens" not in msgspec.json.encode(loaded("m"))
    assert msgspec.json.decode(b'{"model":"m","state":"loaded"}', type=ReplicaInfo).context_tokens is None


LIMITS: dict[str, dict[str, Any]] = {  # Any: JSON, here and below
    "gguf_n_ctx": {"kind": "integer", "minimum": 1, "step": 1, "unit": "tokens", "default": None},
    "gguf_type_k": {"kind": "enum", "allowed_values": ["f16", "q8_0"], "default": "f16"},
}


def facts_of(telemetry: Telemetry) -> list[ModelFacts]:
    assert telemetry.memory is not None
    assert telemetry.memory.models is not None
    return telemetry.memory.models


def test_what_a_load_may_set_stays_as_it_is_within_its_bounds() -> None:
    facts = ModelFacts(
        name="m", backend="gguf", state="loaded", replicas=1, loaded_replicas=1, replica_max=4, target_inflight=2,
        configured_target_inflight=3, estimate_mb=700, estimate_replicas=1, estimate_source="observed_load_delta",
        load_constraints=LIMITS,
    )  # fmt: skip
    assert facts_of(cleaned(memory=MemoryInfo(models=[facts]))) == [facts]


def test_what_a_load_may_set_is_cut_to_size() -> None:
    wild: dict[str, dict[str, Any]] = {
        "x" * 1000: {"a": "\x00" * 1000, "b": [1, "w" * 1000, None] * 100, "c": {"deep": {}}, "d": 1e308 * 10, "e": 2**80},
        **{f"f{number}": dict.fromkeys(map(str, range(500)), 1) for number in range(500)},
    }
    facts = [ModelFacts(name="n" * 1000, estimate_mb=-5, replicas=2**70, load_constraints=wild)] * 500
    kept = facts_of(cleaned(memory=MemoryInfo(models=facts)))
    assert len(kept) == limits().nodes.report_models
    (name, said), *others = kept[0].load_constraints.items()
    assert (len(kept[0].name), kept[0].estimate_mb, len(name), len(others)) == (
        200,
        0,
        40,
        limits().nodes.report_constraints - 1,
    )
    assert {key: said[key] for key in "cde"} == {"c": None, "d": None, "e": None}
    assert all(len(word) <= 40 for word in said["b"])
    assert all(len(inner) <= limits().nodes.report_constraints for _, inner in others)
    long = {
        f"f{number}": dict.fromkeys(map(str, range(limits().nodes.report_constraints)), "w" * 200)
        for number in range(limits().nodes.report_constraints)
    }
    assert facts_of(cleaned(memory=MemoryInfo(models=[ModelFacts(name="n", load_constraints=long)])))[0].load_constraints == {}
    assert len(msgspec.json.encode(kept)) < MEGABYTE


# the model-runner API

CAPABILITIES = """{
  "runnerType": "vllm-0.6.0", "runnerId": "node-1",
  "models": {
    "loaded": [{"id": "meta-llama/Llama-3.1-70B-Instruct", "quantization": "awq-4bit", "contextLength": 32768,
      "loadedAt": 1745880000, "gpuMemoryMB": 24000}],
    "loading": [{"id": "mistralai/Mistral-7B-Instruct-v0.3", "progress": 0.45, "eta": 180}],
    "available": ["meta-llama/Llama-3.1-8B-Instruct", "deepseek-ai/deepseek-r1-distill-llama-70b"]
  },
  "resources": {"gpuIds": [0], "gpuMemoryTotalMB": 81920, "gpuMemoryUsedMB": 58000, "gpuMemoryFreeMB": 23920,
    "gpuUtilization": 0.67, "kvCacheSizeMB": 12000, "kvCacheUtilization": 0.45},
  "queue": {"depth": 3, "maxDepth": 16, "avgWaitMs": 150, "p95WaitMs": 450},
  "capabilities": {"streaming": true, "prefixCaching": true},
  "health": "healthy"
}"""


def test_capabilities_in_the_words_of_the_model_runner_api_become_telemetry() -> None:
    said = read_capabilities(CAPABILITIES.encode(), policy=NodeLimits(), gpu_name="H100")
    assert (said.models, said.ailment) == (("meta-llama/Llama-3.1-70B-Instruct",), "")
    assert (said.vram_used_mb, said.vram_free_mb, said.gpu_util_percent) == (58000, 23920, 67.0)
    told = said.telemetry
    assert told.replicas[0].engine == "vllm"
    assert (told.replicas[0].context_tokens, told.replicas[0].memory_mb) == (32768, 24000)
    assert (told.replicas[1].state, told.replicas[1].progress, told.replicas[1].eta_s) == ("loading", 0.45, 180.0)
    gpu = GpuInfo(index=0, name="H100", memory_total_mb=81920, memory_used_mb=58000, utilization_percent=67.0)
    assert told.gpus == [gpu]
    assert told.memory == MemoryInfo(kind="gpu", total_mb=81920, used_mb=58000, kv_mb=12000)
    assert (told.queue_depth, told.avg_wait_ms) == (3, 150)


@pytest.mark.parametrize(
    ("answer", "names", "replicas", "ailment"),
    [
        ({"models": {}}, (), [], ""),
        ({"models": {"loaded": [{"id": " "}, {"id": "x" * 201}, {"id": "a"}]}}, ("a",), None, ""),
        ({"models": {"failed": [{"id": "a", "reason": "out of memory"}]}}, (), [("a", "failed", None)], ""),
        (
            {"models": {"loaded": [{"id": "a", "replicas": 2, "gpuMemoryMB": 9.0}]}},
            ("a",),
            [("a", "loaded", 4), ("a", "loaded", 4)],
            "",
        ),
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
)
def test_capabilities_that_cannot_be_read_are_refused_with_the_member_that_is_wrong(body: bytes, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        read_capabilities(body, policy=NodeLimits())


# operations and how a node decides about them, of muster v1 alone

STATUS = bridge.OpStatus(op_id="op-1", use=1, state="running", stage="loading", fraction=0.5, eta_s=3.0)
GOVERNANCE = bridge.BoxGovernance(level="L2", runner_id="rig#abc", public_key="AAAA", op_keys={"k1": "c2VjcmV0"}, clock_ms=5)


def registered(
    version: str = bridge.MUSTER_V1, governance: bridge.BoxGovernance | None = None
) -> tuple[ServerSession, Registered]:
    session = ServerSession(NodeLimits())
    hello = bridge.Register(worker_name="rig", models=["m"], protocol_version=version, governance=governance)
    (effect,) = session.receive_text(bridge.encode_message(hello))
    assert isinstance(effect, Registered)
    return session, effect


def said(status: bridge.OpStatus) -> bridge.OpStatus:
    """Send a status and return what arrives of it."""
    session, _ = registered()
    (effect,) = session.receive_text(bridge.encode_message(status))
    assert isinstance(effect, OperationReported)
    return effect.status


def test_a_status_arrives_as_it_was_sent() -> None:
    assert said(STATUS) == STATUS


@pytest.mark.parametrize("message", [STATUS, bridge.GovernanceReport(governance=GOVERNANCE)], ids=["status", "report"])
def test_a_bridge_v1_box_may_not_speak_of_operations(message: bridge.Message) -> None:
    session, _ = registered(bridge.BRIDGE_V1)
    with pytest.raises(ProtocolError):
        session.receive_text(bridge.encode_message(message))


def test_a_bridge_v1_registration_has_no_governance() -> None:
    assert registered(bridge.BRIDGE_V1, GOVERNANCE)[1].message.governance is None
    assert registered(bridge.MUSTER_V1, GOVERNANCE)[1].message.governance == GOVERNANCE


def test_texts_are_cut_and_made_printable() -> None:
    cut = said(
        bridge.OpStatus(op_id="op-1", use=1, state="failed", stage="s" * 999, code="c" * 999, message="a\x00b\n" + "m" * 999)
    )
    assert (len(cut.stage), len(cut.code), len(cut.message)) == (200, 80, 500)
    assert cut.message.startswith("a b m")


@pytest.mark.parametrize("op_id", ["x" * 65, "a\nb"], ids=["long", "unprintable"])
def test_an_id_that_cannot_be_kept_names_nothing(op_id: str) -> None:
    assert said(bridge.OpStatus(op_id=op_id, use=1, state="running")).op_id == ""


@pytest.mark.parametrize("use", [0, -1, 2**40])
def test_an_impossible_use_names_nothing(use: int) -> None:
    assert said(bridge.OpStatus(op_id="op-1", use=use, state="running")).use == 0


def test_a_state_that_is_none_is_not_taken_for_one() -> None:
    assert said(bridge.OpStatus(op_id="op-1", use=1, state="approved")).state == ""


@pytest.mark.parametrize(
    "result",
    [{"a": "x" * limits().nodes.status_result_bytes}, {"a": "x\x00y"}, {"a\x00": 1}],
    ids=["too large", "NUL in a value", "NUL in a name"],
)
def test_a_result_that_cannot_be_stored_is_left_out_and_said_so(result: dict[str, object]) -> None:
    assert set(said(bridge.OpStatus(op_id="op-1", use=1, state="succeeded", result=result)).result) == {"omitted"}


def test_a_result_that_fits_is_kept_to_the_last_byte() -> None:
    result = {"a": "x" * (limits().nodes.status_result_bytes - len(json.dumps({"a": ""})))}
    assert said(bridge.OpStatus(op_id="op-1", use=1, state="succeeded", result=result)).result == result


def test_a_receipt_is_kept_whole_or_not_at_all() -> None:
    whole, long = "r" * limits().nodes.status_receipt_chars, "r" * (limits().nodes.status_receipt_chars + 1)
    assert said(bridge.OpStatus(op_id="op-1", use=1, state="succeeded", receipt=whole)).receipt == whole
    assert said(bridge.OpStatus(op_id="op-1", use=1, state="succeeded", receipt=long)).receipt == ""


def test_shares_and_times_are_brought_into_their_range() -> None:
    cut = said(bridge.OpStatus(op_id="op-1", use=1, state="running", fraction=7.0, eta_s=-3.0))
    assert (cut.fraction, cut.eta_s) == (1.0, 0.0)


def test_a_report_is_cut_to_size() -> None:
    session, _ = registered()
    keys = {f"k{number}": "c2VjcmV0" for number in range(20)}
    said = bridge.BoxGovernance(
        level="L9",
        runner_id="r" * 201,
        public_key="p" * 401,
        op_keys={**keys, "": "x", "k" * 65: "x", "long": "s" * 129},
        policy_version=2**40,
        policy_error="e" * 999,
        witness_size=-1,
        clock_ms=2**60,
    )
    report = bridge.GovernanceReport(governance=said, witness_signature="s" * 129, witness_alarm="a" * 999)
    (effect,) = session.receive_text(bridge.encode_message(report))
    assert isinstance(effect, GovernanceChanged)
    kept = effect.report.governance
    assert (kept.level, kept.runner_id, kept.public_key) == ("", "", "")
    assert len(kept.op_keys) <= limits().nodes.op_keys
    assert set(kept.op_keys) <= set(keys)
    assert (kept.policy_version, kept.witness_size, len(kept.policy_error)) == (2**31 - 1, 0, 300)
    assert (effect.report.witness_signature, len(effect.report.witness_alarm)) == ("", 300)


@pytest.mark.parametrize(
    ("note", "kept"), [("a\n1\n\n\u2014 a b\n", True), ("x" * 8193, False), ("a\x00", False), ("a\r\n", False)]
)
def test_a_note_keeps_its_lines_and_nothing_that_is_none(note: str, kept: bool) -> None:
    session, _ = registered()
    said = bridge.BoxGovernance(level="L2", runner_id="r", public_key="p")
    (effect,) = session.receive_text(bridge.encode_message(bridge.GovernanceReport(governance=said, witness_note=note)))
    assert isinstance(effect, GovernanceChanged)
    assert effect.report.witness_note == (note if kept else "")


def test_of_too_many_keys_the_newest_are_kept() -> None:
    keys = {f"k{number}": "c2VjcmV0" for number in range(20)}
    _, effect = registered(governance=bridge.BoxGovernance(level="L2", runner_id="r#x", public_key="p", op_keys=keys))
    assert effect.message.governance is not None
    assert list(effect.message.governance.op_keys) == [f"k{number}" for number in range(12, 20)]
