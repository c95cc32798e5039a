"""The models that approvals keep loaded: what is written down of each, and how a runner that starts loads them again.

A row of the ledger is believed for its signatures alone. The runner signs what it accepted (the op token with its statement and
proofs, the parameters, the moment) with its own key, and verifies all of it again before it loads anything.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
from cryptography.exceptions import InvalidSignature

from runner.errors import RunnerError
from runner.ledger.database import LedgerError
from runner.ledger.ledger import DesiredModel, Ledger
from runner.limits import limits
from runner.operations.gate import KEEP_PARAM, Accepted
from runner.operations.keys import Identity
from runner.operations.operation import SEAL_DOMAIN, LoadBody
from runner.operations.trust import Governance
from wire import clock
from wire.optoken.approval import Policy, PolicyRef
from wire.optoken.op_token import OpTokenError, read_token
from wire.optoken.verifier import Operation, Verifier

log = logging.getLogger(__name__)

RECLAIMED_FACT = "reclaimed"


class NotDesired(RunnerError):
    """A row of the ledger that permits no load; the text says why."""


def open_sealed(model: DesiredModel, identity: Identity) -> Accepted:
    """Return what the runner accepted. Raises NotDesired for a row that this runner did not write as it stands."""
    try:
        identity.private_key.public_key().verify(model.seal, SEAL_DOMAIN + model.document)
        accepted = msgspec.json.decode(model.document, type=Accepted)
    except (InvalidSignature, msgspec.DecodeError):
        raise NotDesired("the ledger holds it in words that this runner did not sign; have it approved again") from None
    if (accepted.v, accepted.model_id, accepted.fence) != (1, model.model_id, model.fence):
        raise NotDesired("the ledger names another model than the one that was approved; have it approved again")
    return accepted


class DesiredState:
    """Loads desired models again after a start. ``load`` carries a load out and returns its ended task; see ``Operations``.

    ``on_change`` hears when ``problems`` may have changed.
    """

    def __init__(
        self, ledger: Ledger, governance: Governance, load: Callable[[LoadBody], Awaitable[Mapping[str, object]]], *,
        min_signers: int, on_change: Callable[[], None], pauses_s: Sequence[float] | None = None,
        clock: Callable[[], float] = clock.unix_s,
    ) -> None:  # fmt: skip
        self._ledger = ledger
        self._governance = governance
        self._load = load
        self._min_signers = min_signers
        self._on_change = on_change
        bounds = limits().operations
        usual = (bounds.load_pause_first_s, bounds.load_pause_second_s, bounds.load_pause_last_s)
        self._pauses_s = usual if pauses_s is None else pauses_s
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()
        self._reclaimed_by: dict[str, bool] = {}
        self._lent = asyncio.Event()
        self._lent.set()
        self._problems: dict[tuple[str, int], str] = {}
        self._gave_up_ms: dict[tuple[str, int], int] = {}

    @property
    def models(self) -> dict[str, str]:
        """The desired models by name, each with why it could not be loaded again, "" = nothing is wrong."""
        fences = self._ledger.desired_fences
        # A problem is that of one approval: the next one begins without it.
        return {name: self._problems.get((name, fence), "") for name, fence in sorted(fences.items())}

    @property
    def gave_up_ms(self) -> dict[str, int]:
        """When the runner stopped trying to load a desired model, by its name, as Unix time in milliseconds."""
        fences = self._ledger.desired_fences
        return {name: self._gave_up_ms[name, fence] for name, fence in fences.items() if (name, fence) in self._gave_up_ms}

    @property
    def is_reclaimed_by_owner(self) -> bool:
        """Whether the owner took the node back, said on the node itself, and has not lent it since."""
        return self._reclaimed_by.get("owner", False)

    async def open(self) -> None:
        """Read what is desired and who took the node back. Raises LedgerError."""
        await self._ledger.read_desired()
        text = await self._ledger.read_fact(RECLAIMED_FACT)
        if text is not None:
            self._reclaimed_by = json.loads(text)
            self._look_whether_lent()

    async def hear_mode(self, *, said_by: str, is_reclaimed: bool) -> None:
        """Take down that the node is reclaimed or lent: ``said_by`` ``owner`` (on the node) or ``control`` (from afar).

        While either says reclaimed, nothing is loaded again. Raises LedgerError.
        """
        if self._reclaimed_by.get(said_by, False) == is_reclaimed:
            return
        self._reclaimed_by = {**self._reclaimed_by, said_by: is_reclaimed}
        self._look_whether_lent()
        await self._ledger.write_fact(RECLAIMED_FACT, json.dumps(self._reclaimed_by))

    async def restore(self) -> None:
        """Load every desired model again, one after the other; what goes wrong with one is its problem and no other's."""
        try:
            models = await self._ledger.read_desired()
        except LedgerError as error:
            log.error("desired models cannot be read: %s", error)  # noqa: TRY400  # text for the owner
            return
        # All are verified before the first is loaded, so that they are loaded in the order in which they were approved.
        bodies = [(model, await self._find_body(model)) for model in models]
        await asyncio.gather(*(self._try_a_few_times(model, body) for model, body in bodies if body is not None))

    def verify(self, model: DesiredModel) -> Accepted:
        """Return what was approved about a model, after verifying all of it again. Raises NotDesired.

        The token is verified as of the moment at which it was accepted: that it has expired since does not matter, because it
        permits no further run of its operation. Its MAC is not, whose key may have been renewed: the seal vouches for it. The
        policy is the one that the statement names, among those that the runner has pinned, although a newer one may follow it.
        """
        governance = self._governance
        if governance.disabled or governance.identity is None:
            raise NotDesired(f"operations are disabled: {governance.disabled or 'the runner has no data folder'}")
        accepted = open_sealed(model, governance.identity)
        if accepted.params.get(KEEP_PARAM) is not True:
            raise NotDesired("it was approved to be loaded and not to stay loaded")
        try:
            verified = Verifier(
                level=governance.level, min_signers=self._min_signers, runner_id=governance.runner_id, keys={},
                not_before=math.floor(self._ledger.born_at), policy=self._find_policy,
            ).verify_accepted(
                read_token(accepted.token), operation=Operation.MODEL_LOAD, model_id=accepted.model_id, params=accepted.params,
                accepted_at=accepted.accepted_at_ms / 1000,
            )  # fmt: skip
        except OpTokenError as error:
            raise NotDesired(f"its approval does not hold on this runner any more ({error}); have it approved again") from None
        if (verified.op_key, verified.fence) != (accepted.op_key, accepted.fence):
            raise NotDesired("its approval is for another operation; have it approved again")
        return accepted

    def _find_policy(self, ref: PolicyRef) -> Policy | None:
        policies = self._governance.policies
        return None if policies is None else policies.find(ref)

    def _look_whether_lent(self) -> None:
        if any(self._reclaimed_by.values()):
            self._lent.clear()
        else:
            self._lent.set()

    async def _find_body(self, model: DesiredModel) -> LoadBody | None:
        """Return with what a model is loaded again; None when it is not to be, which is its problem then."""
        if model.unfinished >= limits().operations.unfinished:
            times = f"{model.unfinished} times in a row"
            self._give_up(model, f"the runner ended {times} while it loaded it; have it approved again to retry")
            return None
        try:
            accepted = await asyncio.to_thread(self.verify, model)
            # What made room for it then is gone, and nothing else is to go for it.
            return msgspec.convert({**accepted.params, "evictModel": None}, LoadBody)
        except NotDesired as error:
            self._give_up(model, str(error))
        except msgspec.ValidationError as error:  # of a later version of this program
            self._give_up(model, f"its parameters cannot be used: {error}")
        return None

    async def _try_a_few_times(self, model: DesiredModel, body: LoadBody) -> None:
        attempts = len(self._pauses_s) + 1
        for attempt in range(1, attempts + 1):
            await self._wait_lent(model)
            problem = await self._attempt(model, body)
            if problem is None:
                self._note(model, "")
                return
            if attempt == attempts:
                self._give_up(model, f"{attempts} attempts failed, the last with: {problem}")
                return
            pause_s = self._pauses_s[attempt - 1]
            log.warning(
                "desired model was not loaded model=%s attempt=%d of=%d: %s", model.model_id, attempt, attempts, problem
            )
            self._note(model, f"attempt {attempt} of {attempts} failed: {problem}; the next follows after {pause_s:g} s")
            await asyncio.sleep(pause_s)

    async def _wait_lent(self, model: DesiredModel) -> None:
        if not self._lent.is_set():
            self._note(model, "the owner took the node back; it is loaded again when the node is lent")
            await self._lent.wait()
            self._note(model, "")

    async def _attempt(self, model: DesiredModel, body: LoadBody) -> str | None:
        """Return why a model was not loaded; None when it was, or when it is not to be any more."""
        async with self._one_at_a_time:
            try:
                await self._ledger.read_desired()
                # An operation that was approved later has unloaded it, or loaded it otherwise.
                if self._ledger.desired_fences.get(model.model_id) != model.fence:
                    return None
                # Written down before the load begins: one that takes the runner down with it counts.
                await self._ledger.count_unfinished(model, has_ended=False)
                try:
                    task = await self._load(body)
                finally:
                    await self._ledger.count_unfinished(model, has_ended=True)
            except RunnerError as error:
                return str(error)
        return None if task.get("status") == "completed" else str(task.get("error") or task.get("status"))

    def _give_up(self, model: DesiredModel, problem: str) -> None:
        log.error("desired model is not loaded again model=%s: %s", model.model_id, problem)
        self._gave_up_ms[model.model_id, model.fence] = int(self._clock() * 1000)
        self._note(model, problem)

    def _note(self, model: DesiredModel, problem: str) -> None:
        self._problems[model.model_id, model.fence] = problem
        self._on_change()
