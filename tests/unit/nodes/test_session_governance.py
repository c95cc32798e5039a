"""What a box says of operations and of how it decides, on the pure session: muster v1 alone, and cut to sizes."""

from __future__ import annotations

import json

import pytest

from core.limits import NodeLimits, limits
from nodes.session import GovernanceChanged, OperationReported, Registered, ServerSession
from wire import bridge
from wire.bridge import ProtocolError

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
