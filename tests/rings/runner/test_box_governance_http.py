"""An L2 box on its own HTTP port: receipts in its answers, and what its page and its capabilities say of how it decides."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from runner.operations import trust
from runner.operations.identity import load_identity
from runner.operations.op_keys import FOLDER_NAME, OpKeys
from tests.fakes.approvals import Fleet, Issuer
from tests.fakes.runners.api_process import ApiBox, run_api_box
from tests.fakes.runners.governed import enrol
from wire.ids import new_uuid7
from wire.optoken.receipt import digest_result, read_receipt

pytestmark = pytest.mark.timeout(180)


@dataclass
class Enrolled:
    """A box that follows the policy of ``issuer``'s fleet."""

    box: ApiBox
    issuer: Issuer
    data: Path


@pytest.fixture(scope="module")
def enrolled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Enrolled]:
    folder, fleet = tmp_path_factory.mktemp("enrolled"), Fleet()
    asyncio.run(enrol(folder / "data", fleet))
    with run_api_box(folder, "--name", "attic", models=("a",), has_op_key=False) as box:
        runner_id = box.client.get("/v1/capabilities").json()["runnerId"]
        ((kid, key),) = OpKeys(folder / "data" / FOLDER_NAME).read().items()
        yield Enrolled(box, Issuer(fleet, runner_id, kid, key), folder / "data")


def test_a_load_and_an_unload_carry_receipts_and_say_the_same_when_repeated(enrolled: Enrolled) -> None:
    box, issuer = enrolled.box, enrolled.issuer
    op_id, params = new_uuid7().hex, {"modelId": "a"}
    reply = box.client.post(
        "/v1/models/load", json={**params, "verifiedOpToken": issuer.token("model-load", params, op_id=op_id)}
    )
    done = box.finish_load(reply)
    receipt = str(done.pop("receipt"))
    public_key = _public_key(enrolled)
    read = read_receipt(receipt, public_key)
    assert (done["status"], read.outcome, read.result_digest) == ("completed", "succeeded", digest_result(done))
    again = box.client.post(
        "/v1/models/load", json={**params, "verifiedOpToken": issuer.token("model-load", params, op_id=op_id)}
    ).json()
    assert again == {**done, "receipt": receipt, "repeated": True}

    gone = box.client.post("/v1/models/unload", json={**params, "verifiedOpToken": issuer.token("model-unload", params)}).json()
    signed = read_receipt(gone.pop("receipt"), public_key)
    assert signed.result_digest == digest_result(gone)
    flushed = {"scope": "all"}
    answer = box.client.post(
        "/v1/cache/flush", json={**flushed, "verifiedOpToken": issuer.token("cache-flush", flushed)}
    ).json()
    assert read_receipt(answer["receipt"], public_key).operation == "cache-flush"


def test_tokens_without_proofs_are_refused_and_counted_by_reason(enrolled: Enrolled) -> None:
    box, issuer = enrolled.box, enrolled.issuer
    for token in (issuer.bare_token("model-load", {"modelId": "a"}), None, "x"):
        reply = box.client.post("/v1/models/load", json={"modelId": "a", "verifiedOpToken": token})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "op_token_refused")
    metrics = box.client.get("/metrics").text
    assert 'muster_runner_operations_refused_total{reason="level_too_low"} 1.0' in metrics
    assert "muster_runner_policy_version 1.0" in metrics


def test_capabilities_and_page_say_how_the_box_decides(enrolled: Enrolled) -> None:
    state = enrolled.box.client.get("/v1/capabilities").json()
    assert state["runnerId"].startswith("attic#")
    words = enrolled.issuer.fleet.words
    assert state["operations"] == {
        "level": "L2", "policyVersion": 1, "policyWords": words, "witnessSize": 0, "advice": "",
    }  # fmt: skip
    page = enrolled.box.client.get("/").text
    for shown in (state["runnerId"], "L2", f"version 1, {words}", "nothing yet"):
        assert shown in page
    assert "to do" not in page


def test_a_box_without_a_policy_or_a_data_folder_says_what_to_do(tmp_path: Path) -> None:
    with run_api_box(tmp_path, models=("a",), has_op_key=False) as box:
        state = box.client.get("/v1/capabilities").json()["operations"]
        assert (state["level"], state["policyVersion"]) == ("L2", 0)
        assert "./muster trust WORDS" in state["advice"]
        assert "./muster trust WORDS" in box.client.get("/").text
        assert "./muster trust WORDS" in box.log_text()


def test_the_owners_own_key_means_the_public_format_with_a_warning(tmp_path: Path) -> None:
    with run_api_box(tmp_path, models=("a",)) as box:
        box.ensure_loaded("a")
        assert box.client.get("/v1/capabilities").json()["operations"]["level"] == "L0"
        assert "operation tokens of level L0 are taken, because VERIFIED_OP_TOKEN_KEY_PATH is set" in box.log_text()


def test_trust_can_be_read_while_the_box_runs(enrolled: Enrolled, capsys: pytest.CaptureFixture[str]) -> None:
    assert trust.main(["--show", "--data", str(enrolled.data)]) == 0
    said = capsys.readouterr().out
    assert enrolled.issuer.runner_id in said
    assert enrolled.issuer.fleet.words in said


def _public_key(enrolled: Enrolled) -> bytes:
    return load_identity(enrolled.data, "attic").public_key
