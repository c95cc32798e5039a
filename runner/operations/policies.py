"""The policies that this box follows: the first because a person confirmed it here, each next because both accept it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from runner.ledger import Ledger, PolicyRow
from runner.limits import limits
from runner.operations.fingerprint import fingerprint_matches
from wire.optoken.approval import (
    ApprovalError,
    Policy,
    PolicyRef,
    decode_bytes,
    policy_words,
    read_policy,
    read_statement,
    verify_successor,
)

log = logging.getLogger(__name__)

WAITING = "waiting for ./muster trust on the box: a person must confirm the fingerprint of the first policy there"
ANOTHER = "the first policy offered is not the one whose fingerprint was confirmed on the box"
FORGOTTEN = "forgotten on the box by its owner; waiting for ./muster trust there"


@dataclass(frozen=True, slots=True)
class Link:
    """One policy of a chain as it was offered, with what it reads as."""

    row: PolicyRow
    policy: Policy


class PolicyStore:
    """``trusted`` returns the fingerprint that was confirmed on this box, None before."""

    def __init__(self, ledger: Ledger, trusted: Callable[[], str | None]) -> None:
        self._ledger = ledger
        self._trusted = trusted
        self._lock = asyncio.Lock()
        self._chain: list[Policy] = []
        self._offered: list[Mapping[str, object]] = []
        self._judged_by: str | None = None
        self.error = ""
        """Why the last policies offered were not taken over, "" = they were, or none were offered."""
        self.offered_words = ""
        """The fingerprint of a first policy that waits to be confirmed."""

    @property
    def policy(self) -> Policy | None:
        """The pinned policy, None while there is none."""
        return self._chain[-1] if self._chain else None

    def find(self, ref: PolicyRef) -> Policy | None:
        """Return a policy that was pinned, be it followed by others; None for one that was not."""
        return next((policy for policy in self._chain if policy.ref == ref), None)

    async def open(self) -> None:
        """Read what was pinned, and check it again: a chain that does not hold is none. Raises LedgerError."""
        rows = await self._ledger.read_policies()
        try:
            self._chain = await asyncio.to_thread(_walk, rows)
        except (ApprovalError, ValueError) as error:
            self._chain, self.error = [], f"the pinned policy on the box does not hold ({error}); ./muster trust --forget there"
            log.error("pinned policy does not hold, no operation is carried out: %s", error)  # noqa: TRY400 - text says it

    async def offer(self, offered: Sequence[Mapping[str, object]]) -> bool:
        """Take over what follows the pinned policy; return whether anything changed. Raises LedgerError."""
        async with self._lock:
            self._offered = list(offered[: limits().operations.policies])
            return await self._judge()

    async def reconsider(self) -> bool:
        """Judge the last offer again where a person has confirmed another fingerprint since. Raises LedgerError."""
        async with self._lock:
            if self.policy is not None or not self._offered:
                return False
            if await asyncio.to_thread(self._trusted) == self._judged_by:
                return False
            return await self._judge()

    async def forget(self) -> None:
        """Follow no policy any more; what is offered next has to be confirmed again."""
        async with self._lock:
            self._chain, self._offered, self.offered_words, self.error = [], [], "", FORGOTTEN

    async def _judge(self) -> bool:
        before = (self.policy, self.error)
        self.error = self.offered_words = ""
        self._judged_by = await asyncio.to_thread(self._trusted)
        for each in self._offered:
            try:
                link = await asyncio.to_thread(_read_link, each, self._chain)
            except (ApprovalError, KeyError, TypeError, ValueError) as error:
                self.error = _explain(error)
                break
            if link is None:
                continue  # it is held already
            if self.policy is None and not self._is_confirmed(link):
                break
            await self._ledger.add_policy(link.row)
            self._chain.append(link.policy)
            log.warning(
                "policy pinned id=%s version=%d words=%s", link.policy.ref.id, link.policy.ref.version, words_of(link.policy)
            )
        if self.error:
            log.warning("policy was not taken over: %s", self.error)
        return (self.policy, self.error) != before

    def _is_confirmed(self, link: Link) -> bool:
        if self._judged_by is not None and fingerprint_matches(self._judged_by, link.row.document):
            return True
        self.error = WAITING if self._judged_by is None else ANOTHER
        self.offered_words = words_of(link.policy)
        return False


def words_of(policy: Policy) -> str:
    """Return the fingerprint of a policy as twelve words."""
    return policy_words(policy.ref.sha256)


def _walk(rows: Sequence[PolicyRow]) -> list[Policy]:
    chain: list[Policy] = []
    for row in rows:
        current = chain[-1] if chain else None
        chain.append(verify_successor(row.document, read_statement(row.statement), row.proofs, current=current))
    return chain


def _read_link(offered: Mapping[str, object], chain: Sequence[Policy]) -> Link | None:
    """Return the next policy of the chain; None for one that is held already. Raises ApprovalError, KeyError, TypeError."""
    document = decode_bytes(offered["document"])
    ref = read_policy(document).ref
    if any(policy.ref == ref for policy in chain):
        return None
    statement, proofs = decode_bytes(offered["statement"]), offered["proofs"]
    if not isinstance(proofs, list):
        raise TypeError("proofs")
    current = chain[-1] if chain else None
    policy = verify_successor(document, read_statement(statement), proofs, current=current)
    return Link(PolicyRow(policy.ref.version, document, statement, proofs), policy)


def _explain(error: Exception) -> str:
    """Return why a policy was refused, in words that name the rule; a malformed offer has none."""
    if isinstance(error, ApprovalError):
        return f"{error.rule.value}: {error}"
    return "an offered policy has no document, statement and list of proofs"
