"""How this box decides about operations: who it is, at which level, by which policy and keys, and what it has witnessed.

It is the one who answers offers of policies and checkpoints and who sees what its owner changed in the data folder. Deciding
about one token is the gate's.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runner.config import OperationsConfig
from runner.ledger import Ledger, LedgerError
from runner.operations.fingerprint import forget_is_done, is_asked_to_forget, read_trusted, use_up_trusted
from runner.operations.identity import Identity, load_identity
from runner.operations.keys import UnusableKey
from runner.operations.op_keys import FOLDER_NAME, OpKeys
from runner.operations.policies import PolicyStore, words_of
from runner.operations.witness import FACT as WITNESS_FACT
from runner.operations.witness import Sighting, Witness
from wire import clock
from wire.auditlog import to_text
from wire.bridge import BoxGovernance, CheckpointOffer, GovernanceReport, PolicyOffer
from wire.optoken import Level, Policy
from wire.optoken.approval import CLOCK_SKEW_S, encode_bytes

log = logging.getLogger(__name__)

BOX_FACT = "box"
"""What ``./muster trust --show`` tells of a box: its id and level as of its last start."""
_FIRST_KEY_FACT = "first_key"
"""The runner id of the key that was made when this ledger was there already."""
NEEDS_DATA = "at level L2 a node keeps what it did in a folder; start it with --data DIR"


@dataclass(frozen=True, slots=True)
class Standing:
    """How a box stands, for its page and for ``GET /v1/capabilities``. ``advice``: what its owner should do, "" = nothing."""

    level: str
    runner_id: str
    policy_version: int
    policy_words: str
    witness_size: int
    advice: str


class Governance:
    """``disabled``: why no operation is carried out whatever its token, "" = they are. Times are Unix seconds."""

    def __init__(
        self,
        wanted: OperationsConfig,
        *,
        data: Path | None,
        name: str,
        ledger: Ledger,
        clock: Callable[[], float] = clock.unix_s,
    ) -> None:
        self._wanted = wanted
        self._data = data
        self._name = name
        self._ledger = ledger
        self._clock = clock
        self._lock = asyncio.Lock()
        self._held_keys: dict[str, bytes] = {}
        self.level = Level(f"L{wanted.level}")
        self.disabled = NEEDS_DATA if self.level is Level.L2 and data is None else ""
        self.identity: Identity | None = None
        self.policies: PolicyStore | None = None
        self.witness: Witness | None = None
        self._own_keys: OpKeys | None = None
        self._seen: tuple[int, ...] | None = None

    async def open(self) -> None:
        """Read or make what lies in the data folder. Raises ConfigError and LedgerError."""
        data = self._data
        if data is None:
            return
        self.identity = await asyncio.to_thread(load_identity, data, self._name)
        await self._allow_for_a_clock_ahead(self.identity)
        if self.level is not Level.L0 and self._wanted.key_path is None:
            self._own_keys = OpKeys(data / FOLDER_NAME)
            await asyncio.to_thread(self._make_first_key)
        self.policies = PolicyStore(self._ledger, lambda: read_trusted(data))
        self.witness = Witness(self._ledger, self.identity)
        await self.policies.open()
        await self.witness.open()
        await self._ledger.write_fact(BOX_FACT, json.dumps({"runnerId": self.runner_id, "level": self.level.value}))
        await self.look()

    async def _allow_for_a_clock_ahead(self, identity: Identity) -> None:
        """Let a new box whose clock is ahead take what was approved in its first minute.

        Nothing can come back by it: at L2 an approval names the key of the box, and of a key that was made when this ledger was
        there already no other ledger has carried anything out. A ledger that follows one that was lost allows nothing.
        """
        if identity.is_new:
            await self._ledger.write_fact(_FIRST_KEY_FACT, identity.certified_id)
        if self.level is Level.L2 and await self._ledger.read_fact(_FIRST_KEY_FACT) == identity.certified_id:
            self._ledger.born_at -= CLOCK_SKEW_S

    @property
    def runner_id(self) -> str:
        """The audience of tokens for this box. At L2 it names the box's key, below that it is what its owner chose."""
        if self.level is Level.L2 and self.identity is not None:
            return self.identity.certified_id
        return self._wanted.runner_id or self._name

    @property
    def key_path(self) -> Path | None:
        """Where the HMAC keys of tokens lie, None = there are none."""
        return self._wanted.key_path if self._own_keys is None else self._own_keys.folder

    @property
    def policy(self) -> Policy | None:
        """The pinned policy."""
        return None if self.policies is None else self.policies.policy

    @property
    def standing(self) -> Standing:
        """How things stand now."""
        seen = None if self.witness is None else self.witness.seen
        policy = self.policy
        return Standing(
            level=self.level.value,
            runner_id=self.runner_id,
            policy_version=0 if policy is None else policy.ref.version,
            policy_words="" if policy is None else words_of(policy),
            witness_size=0 if seen is None else seen.size,
            advice=self._advise(),
        )

    def describe(self) -> BoxGovernance | None:
        """Return what the control plane is told; None for a box without a data folder, which has no identity."""
        if self.identity is None or self.policies is None or self.witness is None:
            return None
        seen, policy = self.witness.seen, self.policy
        return BoxGovernance(
            level=self.level.value,
            runner_id=self.runner_id,
            public_key=encode_bytes(self.identity.public_key),
            op_keys={kid: encode_bytes(key) for kid, key in self._held_keys.items()},
            policy_version=0 if policy is None else policy.ref.version,
            policy_sha256="" if policy is None else policy.ref.sha256,
            policy_error=self.policies.error,
            witness_size=0 if seen is None else seen.size,
            witness_root="" if seen is None else to_text(seen.root),
            clock_ms=int(self._clock() * 1000),
            keeps_models=self.level is not Level.L0 and not self.disabled,
            reloads_settings=not self.disabled,
        )

    async def look(self) -> GovernanceReport | None:
        """See what changed in the data folder; return what the control plane should hear of it, None = nothing."""
        data = self._data
        if data is None or self.policies is None:
            return None
        async with self._lock:
            try:
                stamp = await asyncio.to_thread(self._stamp_folders, data)
                if stamp == self._seen:
                    return None
                has_forgotten = await asyncio.to_thread(is_asked_to_forget, data) and await self._forget(data)
                has_pinned = await self.policies.reconsider()
                has_keys = await asyncio.to_thread(self._read_keys)
                if self.policy is not None:
                    await asyncio.to_thread(use_up_trusted, data)
                self._seen = stamp
            except (OSError, UnusableKey, LedgerError) as error:
                log.error("data folder cannot be looked through: %s", error)  # noqa: TRY400 - text for the owner
                return None
        return self._report() if has_forgotten or has_pinned or has_keys else None

    async def take_policies(self, offer: PolicyOffer) -> GovernanceReport | None:
        """Judge offered policies and say what came of it; None from a box that cannot keep any. Raises LedgerError."""
        if self.policies is None:
            return None
        async with self._lock:
            await self.policies.offer(offer.policies)
        return self._report()

    async def take_checkpoint(self, offer: CheckpointOffer) -> GovernanceReport | None:
        """Judge a checkpoint and say what came of it; None from a box that cannot keep any. Raises LedgerError."""
        if self.witness is None:
            return None
        async with self._lock:
            policy = self.policy
            if policy is None:  # nobody here knows yet whose signature counts
                return self._report()
            sighting = await self.witness.judge(offer, log_keys=policy.log_keys, runner_id=self.runner_id)
        return self._report(sighting)

    def _report(self, said: Sighting | None = None) -> GovernanceReport | None:
        told, word = self.describe(), said or Sighting()
        if told is None:
            return None
        return GovernanceReport(
            governance=told, witness_signature=word.signature, witness_note=word.note, witness_alarm=word.alarm
        )

    async def _forget(self, data: Path) -> bool:
        assert self.policies is not None
        assert self.witness is not None
        log.warning("THE OWNER HAS THIS BOX FORGET ITS POLICY AND ITS WITNESSED CHECKPOINT; no operation until ./muster trust")
        await self._ledger.forget_trust(WITNESS_FACT)
        await self.policies.forget()
        self.witness.forget()
        await asyncio.to_thread(forget_is_done, data)
        return True

    def _stamp_folders(self, data: Path) -> tuple[int, ...]:
        """Return what changes when a file comes to the data folder or to that of the keys, or leaves it. Raises OSError.

        And each minute: a key is dropped when its successor is old enough, and a file system may count its changes in steps.
        """
        folders = [data] if self._own_keys is None else [data, self._own_keys.folder]
        return int(self._clock() // 60), *(folder.stat().st_mtime_ns for folder in folders)

    def _make_first_key(self) -> None:
        assert self._own_keys is not None
        self._own_keys.ensure(self._clock())

    def _read_keys(self) -> bool:
        """Return whether there are other keys than before."""
        if self._own_keys is None:
            return False
        if dropped := self._own_keys.drop_retired(self._clock()):
            log.info("operation keys dropped, their successor is a day old kids=%s", ",".join(dropped))
        before, self._held_keys = self._held_keys, self._own_keys.read()
        return before != self._held_keys

    def _advise(self) -> str:
        if self.disabled:
            return f"Remote load/unload is off: {self.disabled}."
        if self.level is not Level.L2 or self.policy is not None or self.policies is None:
            return ""
        if self.policies.offered_words:
            return (
                f"The control plane offers a policy with the fingerprint {self.policies.offered_words}. Compare it with what "
                "the approvers see, then run ./muster trust with it on this box. Until then no operation is carried out."
            )
        return (
            "No policy is pinned, so no operation is carried out. Connect the box, get the fingerprint of the policy from the "
            "approvers, then run ./muster trust WORDS on this box."
        )
