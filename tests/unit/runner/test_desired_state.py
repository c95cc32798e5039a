"""What a runner believes of the models that its ledger says are to be loaded: nothing that was not signed, then and now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runner.config.values import OperationsConfig
from runner.errors import InvalidRequest, OpTokenRefused, WrongState
from runner.ledger import DesiredModel, Ledger
from runner.limits import limits
from runner.operations.bodies import LoadBody
from runner.operations.desired_state import Accepted, DesiredState, NotDesired, open_sealed, seal_accepted
from runner.operations.fingerprint import write_trusted
from runner.operations.gate import Gate, GateRules
from runner.operations.governance import Governance
from runner.operations.identity import Identity, load_identity
from tests.fakes.approvals import Fleet, Issuer
from tests.fakes.ledgers import T0, Clock
from tests.fakes.runners.gates import admit, l0, opened, write_key
from tests.fakes.waiting import eventually
from wire.bridge import PolicyOffer
from wire.optoken import Operation, encode_token

NOW = T0 + 10
LATER = T0 + 400 * 86_400
"""Long after token, window and policy have expired."""
PARAMS: dict[str, object] = {"modelId": "a", "maxContextLength": 512, "keepLoaded": True}


class Node:
    """A runner without its models: it lets loads in, writes them down, and loads again what ``loads`` says how."""

    def __init__(
        self, governance: Governance, ledger: Ledger, fleet: Fleet, clock: Clock, *, level: int, thief: Identity
    ) -> None:
        told = governance.describe()
        assert told is not None
        assert governance.identity is not None
        self.governance, self.ledger, self.clock, self.fleet = governance, ledger, clock, fleet
        self.identity: Identity = governance.identity
        self.issuer = Issuer.of(fleet, told)
        rules = GateRules(
            key_path=governance.key_path, level=governance.level, min_signers=1, runner_id=governance.runner_id,
            policy=lambda: governance.policy, disabled=governance.disabled,
        )  # fmt: skip
        self.gate = Gate(rules, ledger=ledger, clock=clock)
        self.bodies: list[LoadBody] = []
        self.answers: list[Mapping[str, object] | Exception] = []
        self.changes: list[dict[str, str]] = []
        self.level, self.thief = level, thief
        self.state = self.make_state()

    def make_state(self, *, pauses_s: Sequence[float] = (0.0, 0.0)) -> DesiredState:
        return DesiredState(
            self.ledger, self.governance, self.load, min_signers=1, pauses_s=pauses_s, clock=self.clock,
            on_change=lambda: self.changes.append(self.state.models),
        )  # fmt: skip

    async def load(self, body: LoadBody) -> Mapping[str, object]:
        self.bodies.append(body)
        answer = self.answers.pop(0) if self.answers else {"status": "completed"}
        if isinstance(answer, Exception):
            raise answer
        return answer

    def token(self, params: Mapping[str, object], **changes: Any) -> dict[str, Any]:
        if self.level == 1:
            return self.issuer.bare_token("model-load", params)
        return self.issuer.token("model-load", params, now=self.clock.now, **changes)

    async def accept(self, params: Mapping[str, object] = PARAMS, **changes: Any) -> DesiredModel:
        """Let a load in and write it down as one that succeeded."""
        admitted = await self.gate.admit(
            self.token(params, **changes), operation=Operation.MODEL_LOAD, model_id=str(params["modelId"]), params=params
        )
        assert admitted.keeps is not None
        model = seal_accepted(admitted.keeps, self.identity)
        await self.gate.finish(admitted, {"state": "succeeded"}, desired=model)
        return model


@asynccontextmanager
async def node_in(tmp_path: Path, *, level: int = 2, fleet: Fleet | None = None, name: str = "attic") -> AsyncIterator[Node]:
    data = tmp_path / "data"
    is_new = not data.exists()
    data.mkdir(exist_ok=True)
    clock = Clock(T0 if is_new else NOW)
    ledger = await Ledger.open(data, clock=clock)
    fleet = fleet or Fleet(T0)
    try:
        wanted = OperationsConfig(key_path=None, level=level, is_level_given=True, min_signers=1, runner_id="", ops_per_hour=60)
        governance = Governance(wanted, data=data, name=name, ledger=ledger, clock=clock)
        if is_new:
            write_trusted(data, fleet.words)
        await governance.open()
        await governance.take_policies(PolicyOffer(policies=fleet.links))
        clock.now = NOW
        thief = load_identity(tmp_path, "thief")
        node = Node(governance, ledger, fleet, clock, level=level, thief=thief)
        await node.state.open()
        yield node
    finally:
        await ledger.close()


def rewrite(model: DesiredModel, node: Node, **changes: object) -> DesiredModel:
    """The same row with another document, under the seal of the right one."""
    accepted = open_sealed(model, node.identity)
    return replace(model, document=msgspec.json.encode(msgspec.structs.replace(accepted, **changes)))


def resign(model: DesiredModel, node: Node, **changes: object) -> DesiredModel:
    """The same row with another document, sealed by the runner: what even its own key cannot make load."""
    accepted = msgspec.structs.replace(open_sealed(model, node.identity), **changes)
    return replace(seal_accepted(accepted, node.identity), model_id=model.model_id, fence=model.fence)


def swap_token(model: DesiredModel, node: Node, token: Mapping[str, object], **changes: object) -> DesiredModel:
    return resign(model, node, token=encode_token(token), **changes)


async def test_what_was_approved_is_believed_under_newer_policies_and_long_after_everything_expired(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        model = await node.accept()
        node.fleet.add_policy()
        await node.governance.take_policies(PolicyOffer(policies=node.fleet.links))
        assert node.governance.policy is not None
        assert node.governance.policy.ref.version == 2
        node.clock.now = LATER
        assert node.state.verify(model).params == PARAMS
        assert [each.document for each in await node.ledger.read_desired()] == [model.document]


async def test_a_renewed_key_does_not_end_it_and_a_node_that_asks_for_more_wants_it_approved_again(tmp_path: Path) -> None:
    fleet = Fleet(T0)
    async with node_in(tmp_path, level=1, fleet=fleet) as node:
        node.clock.now = time.time()
        model = await node.accept()
        for path in node.governance.key_path.iterdir():  # type: ignore[union-attr]  # a folder at level 1
            path.unlink()
        assert node.state.verify(model).model_id == "a"
    async with node_in(tmp_path, level=2, fleet=fleet) as node:
        with pytest.raises(NotDesired, match="level_too_low"):
            node.state.verify(model)


Forgery = Callable[[Node, DesiredModel], DesiredModel]

FORGERIES: dict[str, tuple[Forgery, str]] = {
    "another model in the row": (lambda n, m: replace(m, model_id="b"), "another model"),
    "another fence in the row": (lambda n, m: replace(m, fence=m.fence + 1), "another model"),
    "another model in the document": (lambda n, m: replace(rewrite(m, n, model_id="b"), model_id="b"), "did not sign"),
    "other parameters": (lambda n, m: rewrite(m, n, params={**PARAMS, "maxContextLength": 9}), "did not sign"),
    "a later moment": (lambda n, m: rewrite(m, n, accepted_at_ms=1), "did not sign"),
    "no seal": (lambda n, m: replace(m, seal=b""), "did not sign"),
    "a seal of somebody else": (lambda n, m: seal_accepted(open_sealed(m, n.identity), n.thief), "did not sign"),
    "no document": (lambda n, m: replace(m, document=b"{}"), "did not sign"),
    # From here on the forger has the runner's own key; what people signed still decides.
    "sealed with other parameters": (lambda n, m: resign(m, n, params={**PARAMS, "maxContextLength": 9}), "wrong_params"),
    "sealed with another model": (
        lambda n, m: replace(resign(m, n, model_id="b", params={**PARAMS, "modelId": "b"}), model_id="b"), "wrong_model",
    ),
    "sealed for another use": (lambda n, m: resign(m, n, op_key="op-9.1"), "another operation"),
    "sealed at a moment outside the window": (
        lambda n, m: resign(m, n, accepted_at_ms=int(LATER * 1000)), "does not hold",
    ),
    "sealed with what the control plane makes alone": (
        lambda n, m: swap_token(m, n, n.issuer.bare_token("model-load", PARAMS)), "does not hold",
    ),
    "sealed with one approval too few": (
        lambda n, m: swap_token(m, n, n.issuer.token("model-load", PARAMS, now=NOW, approvers=1)), "too_few_approvers",
    ),
    "sealed with the approval of an unload": (
        lambda n, m: swap_token(m, n, n.issuer.token("model-unload", {"modelId": "a"}, now=NOW)), "does not hold",
    ),
    "sealed with the approval of another node": (
        lambda n, m: swap_token(m, n, n.issuer.token("model-load", PARAMS, now=NOW, targets=["other#node"])), "wrong_target",
    ),
    "sealed with the approvals of other people": (
        lambda n, m: swap_token(m, n, replace(n.issuer, fleet=Fleet(T0)).token("model-load", PARAMS, now=NOW)), "does not hold",
    ),
    "sealed with a statement that does not say to keep it": (
        lambda n, m: swap_token(
            m, n, n.issuer.token("model-load", {"modelId": "a"}, now=NOW), params={"modelId": "a"}
        ), "not to stay loaded",
    ),
    "a statement that does not say to keep it, with parameters that do": (
        lambda n, m: swap_token(
            m, n, n.issuer.token("model-load", {"modelId": "a"}, now=NOW), params={"modelId": "a", "keepLoaded": True}
        ), "wrong_params",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FORGERIES))
async def test_a_row_that_was_tampered_with_loads_nothing_and_says_so(tmp_path: Path, name: str) -> None:
    forge, words = FORGERIES[name]
    async with node_in(tmp_path) as node:
        model = await node.accept()
        with pytest.raises(NotDesired, match=words):
            node.state.verify(forge(node, model))
        assert node.state.verify(model).model_id == "a", "it differs from what holds in one thing"


async def test_a_row_of_another_node_loads_nothing(tmp_path: Path) -> None:
    fleet = Fleet(T0)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    async with node_in(tmp_path / "one", fleet=fleet) as one, node_in(tmp_path / "two", fleet=fleet) as two:
        model = await one.accept()
        with pytest.raises(NotDesired, match="did not sign"):
            two.state.verify(model)


async def test_a_node_that_forgot_whom_it_trusts_keeps_nothing_loaded(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        model = await node.accept()
        assert node.governance.policies is not None
        await node.governance.policies.forget()
        with pytest.raises(NotDesired, match="no_policy"):
            node.state.verify(model)


async def test_only_a_load_whose_statement_says_so_is_kept(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        for params in ({"modelId": "a"}, {"modelId": "a", "keepLoaded": False}):
            request: dict[str, Any] = {"operation": Operation.MODEL_LOAD, "model_id": "a"}
            with pytest.raises(OpTokenRefused):
                await node.gate.admit(node.token(params), **request, params={"modelId": "a", "keepLoaded": True})
            assert (await node.gate.admit(node.token(params), **request, params=params)).keeps is None
        assert await node.ledger.read_desired() == []


async def test_a_model_is_loaded_again_with_its_parameters(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        await node.accept({**PARAMS, "evictModel": "b"})
        node.answers = [WrongState("no room")]
        await node.state.restore()
        assert [(body.modelId, body.maxContextLength, body.evictModel) for body in node.bodies] == [("a", 512, None)] * 2
        assert (node.state.models, node.state.gave_up_ms) == ({"a": ""}, {})


async def test_a_load_that_fails_is_tried_a_few_times_then_said_to_have_failed(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        await node.accept()
        node.answers = [WrongState("no room"), {"status": "failed", "error": "no file"}, WrongState("no room at all")]
        await node.state.restore()
        assert len(node.bodies) == 3
        assert node.state.models == {"a": "3 attempts failed, the last with: no room at all"}
        assert {"a": "attempt 1 of 3 failed: no room; the next follows after 0 s"} in node.changes
        assert node.state.gave_up_ms == {"a": NOW * 1000}
        assert [model.unfinished for model in await node.ledger.read_desired()] == [0]
        await node.accept({"modelId": "b", "keepLoaded": True})
        node.answers, node.state = [WrongState("no room")], node.make_state(pauses_s=(3600.0,))
        restoring = asyncio.create_task(node.state.restore())
        await eventually(lambda: node.state.models["a"].startswith("attempt 1 of 2 failed") and node.state.models["b"] == "")
        assert ([body.modelId for body in node.bodies[3:]], node.state.gave_up_ms) == (["a", "b"], {}), "attempts follow"
        restoring.cancel()


async def test_a_model_that_takes_the_runner_down_with_it_is_not_tried_for_ever(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        model = await node.accept()
        for _ in range(limits().operations.unfinished):
            await node.ledger.count_unfinished(model, has_ended=False)
        await node.state.restore()
        assert node.bodies == []
        assert "the runner ended 3 times in a row" in node.state.models["a"]
        await node.accept()  # an approval is the way out
        await node.state.restore()
        assert len(node.bodies) == 1
        await node.ledger._run(lambda db: db.execute("UPDATE desired_models SET seal = x'00'").rowcount)
        await node.state.restore()
        assert ("did not sign" in node.state.models["a"], len(node.bodies)) == (True, 1)
        with pytest.raises(msgspec.ValidationError):  # the document holds no more than what is verified
            msgspec.convert({"v": 1, "surprise": True}, Accepted)


@pytest.mark.parametrize("said_by", ["owner", "control"])
async def test_a_node_that_its_owner_took_back_loads_nothing_until_it_is_lent(tmp_path: Path, said_by: str) -> None:
    async with node_in(tmp_path) as node:
        await node.accept()
        await node.state.hear_mode(said_by=said_by, is_reclaimed=True)
    async with node_in(tmp_path, fleet=node.fleet) as again:
        assert again.state.is_reclaimed_by_owner is (said_by == "owner")
        work = asyncio.create_task(again.state.restore())
        await eventually(lambda: "the owner took the node back" in again.state.models.get("a", ""))
        assert again.bodies == []
        other = "control" if said_by == "owner" else "owner"
        await again.state.hear_mode(said_by=other, is_reclaimed=False)
        assert not work.done()
        await again.state.hear_mode(said_by=said_by, is_reclaimed=False)
        await work
        assert len(again.bodies) == 1


async def test_a_token_of_level_0_cannot_keep_a_model_loaded(tmp_path: Path) -> None:
    async with opened(write_key(tmp_path / "op.key"), tmp_path / "data") as gate:
        token = l0(model_id="a")
        with pytest.raises(InvalidRequest, match="signs no parameters"):
            await admit(gate, token, model_id="a", params=PARAMS)
        admitted = await admit(gate, token, model_id="a", params={"modelId": "a"})
        assert admitted.keeps is None, "the token was not spent by the refusal"
