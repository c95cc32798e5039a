"""Whether a token holds for one request on one node at one moment. Cheap checks first, the signature before any content.

What needs memory (nonce seen, approval used, fence overtaken) comes after and is the caller's, in this order: spend the nonce,
then compare the fence and book the operation.

A token names no model by leaving ``modelId`` out (L0 also: null), and then it holds only for a request that names none. There
is no wildcard: ``"*"`` is the name of a model that nobody has.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from wire.limits import WIRE
from wire.optoken.approval import (
    ApprovalError,
    Policy,
    PolicyRef,
    Rule,
    Statement,
    canonical,
    decode_bytes,
    find_class,
    read_statement,
    verify_approval,
)
from wire.optoken.op_token import (
    TOKEN_MEMBER,
    TOKEN_VERSION,
    Claim,
    NotCanonical,
    OpTokenError,
    Reason,
    SignedToken,
    canonical_bytes,
    decode_base64url,
    params_digest,
    spec_bytes,
)

_HEX_MAC = re.compile(r"[0-9a-f]{64}")
_JWT_L0_MEMBERS = frozenset({"operation", "modelId", "issuedAt", "signers", "nonce"} | {"iat", "nbf", "exp", "aud"})
"""All that a JWT at L0 may say: the members of L0, and those claims of RFC 7519 that are honoured here."""
_L1_MEMBERS = frozenset(
    {"operation", "modelId", "issuedAt", "signers", "nonce"}
    | {"v", "kid", "aud", "exp", "opId", "use", "stmtDigest", "paramsDigest", "fence", "checkpoint"}
)
"""All that a token from L1 on may say: what a node does not know, it cannot honour."""


PinnedPolicy = Policy | Callable[[PolicyRef], Policy | None] | None


class Operation(StrEnum):
    """What a token can permit."""

    MODEL_LOAD = "model-load"
    MODEL_UNLOAD = "model-unload"
    CACHE_FLUSH = "cache-flush"
    SETTINGS_RELOAD = "settings-reload"


class Level(StrEnum):
    """How much a token proves. The names sort by strength, and are compared so."""

    L0 = "L0"
    L1 = "L1"
    L2 = "L2"


@dataclass(frozen=True, slots=True)
class Verified:
    """A token that holds. ``op_id`` and ``fence`` are None at L0, which has neither.

    ``expires_at``: Unix seconds after which this token would be refused anyway, so its nonce need not be remembered longer.
    ``max_uses``: how often the approval behind ``op_id`` may be carried out; ``use``: which of them this is, from 1.
    From ``statement`` on: what people signed, at L2 only. ``approvers`` are those whose proofs hold, while ``signers`` is
    what the issuer says. ``daily_cap``: uses of ``op_class`` that a node allows in 24 h, 0 = no cap. ``not_after`` (Unix
    seconds): when the approval ends.
    """

    level: Level
    kid: str
    nonce: str
    op_id: str | None
    signers: tuple[str, ...]
    fence: int | None
    expires_at: int
    max_uses: int
    use: int = 1
    statement: Statement | None = None
    approvers: tuple[str, ...] = ()
    op_class: str = ""
    daily_cap: int = 0
    not_after: int | None = None

    @property
    def op_key(self) -> str | None:
        """What a ledger books once: the approval, at L2 with the number of its use; None at L0."""
        return f"{self.op_id}.{self.use}" if self.level is Level.L2 else self.op_id


@dataclass(frozen=True, slots=True)
class Verifier:
    """The rules of one node; the token has no say in them.

    ``keys``: HMAC-SHA256 keys by id, ``""`` the one that L0 tokens (which name none) are checked with. ``runner_id``: the
    audience this node answers to. ``not_before``: Unix seconds before which nothing is remembered; older tokens are refused,
    and at L2 approvals that were asked for earlier.
    ``policy``: what this node has pinned, or what finds the one of its policies that a statement names; without one, an L2 node
    refuses every token. ``min_signers`` counts below L2 only, where the issuer is believed about who signed; at L2 the policy
    decides. ``counted_signers``: the names that count towards it, None = any. Raises ValueError for rules that would accept
    what nobody signed.
    """

    level: Level
    min_signers: int
    runner_id: str
    keys: Mapping[str, bytes] = field(repr=False)
    not_before: float | None = None
    policy: PinnedPolicy = field(default=None, repr=False)
    counted_signers: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.min_signers < 1:
            raise ValueError("at least one signer must be required")
        if not self.runner_id:
            raise ValueError("a node without an id cannot be the audience of a token")
        if any(len(key) < WIRE.token_least_key_bytes for key in self.keys.values()):
            raise ValueError(f"a key shorter than {WIRE.token_least_key_bytes} bytes")

    def verify(
        self, token: SignedToken, *, operation: Operation, model_id: str | None, params: Mapping[str, object], now: float
    ) -> Verified:
        """Return what the token proves for a request, or raise OpTokenError with the first check that failed.

        ``params``: every member of the request body as it will be acted on. ``now``: Unix seconds, read once by the caller.
        A node below L2 takes a token with statement and proofs for an L1 token and does not look at them.
        """
        level = self._find_level(token)
        kid = self._check_signature(token, level)
        return self._check_content(
            token, level, kid, operation=operation, model_id=model_id, params=params, now=now
        )  # fmt: skip

    def verify_accepted(
        self, token: SignedToken, *, operation: Operation, model_id: str | None, params: Mapping[str, object],
        accepted_at: float,
    ) -> Verified:  # fmt: skip
        """Return what a token proves that this node accepted at ``accepted_at`` (Unix seconds), by all checks but its MAC.

        The key of the MAC may be gone by now. So the caller must know by other means that this node has verified these very
        members then, and must not take the token for a permit to do the operation once more. Raises OpTokenError.
        """
        level = self._find_level(token)
        if level is Level.L0:
            raise OpTokenError(Reason.LEVEL_TOO_LOW)
        kid = _read_text(token.claims, "kid") if token.claims.get("kid") else ""
        return self._check_content(
            token, level, kid, operation=operation, model_id=model_id, params=params, now=accepted_at
        )  # fmt: skip

    def _find_level(self, token: SignedToken) -> Level:
        """Return the level at which a token is judged. Raises OpTokenError for one below this node's own."""
        carried = _read_level(token)
        if carried < self.level:
            raise OpTokenError(Reason.LEVEL_TOO_LOW)
        # Below L2 a node takes a token with statement and proofs for one of L1, and does not look at them.
        return min(carried, max(self.level, Level.L1))

    def _check_content(
        self, token: SignedToken, level: Level, kid: str, *, operation: Operation, model_id: str | None,
        params: Mapping[str, object], now: float,
    ) -> Verified:  # fmt: skip
        """Return what a token proves whose signature is no question any more."""
        expires_at = self._check_l0(token.claims, now) if level is Level.L0 else self._check_l1(token.claims, now)
        if level is Level.L0 and token.jwt_input is not None:
            self._check_jwt_claims(token.claims, now)
        _check_purpose(token.claims, operation, model_id)
        if level is not Level.L0:
            _check_params(token.claims, params)
        signers = _read_signers(token.claims)
        counted = [name for name in signers if self.counted_signers is None or name in self.counted_signers]
        if level is not Level.L2 and len(counted) < self.min_signers:
            raise OpTokenError(Reason.TOO_FEW_SIGNERS)
        verified = Verified(
            level=level,
            kid=kid,
            nonce=_read_text(token.claims, "nonce", shortest=WIRE.token_least_nonce_chars),
            op_id=None if level is Level.L0 else _read_text(token.claims, "opId"),
            signers=signers,
            fence=None if level is Level.L0 else _read_integer(token.claims, "fence", least=1),
            expires_at=expires_at,
            max_uses=1,
            use=1 if level is Level.L0 or "use" not in token.claims else _read_integer(token.claims, "use", least=1),
        )
        if level is Level.L2:
            return self._check_approval(token, verified, operation=operation, model_id=model_id, params=params, now=now)
        if verified.use != 1:
            raise OpTokenError(Reason.NOT_APPROVED, rule=Rule.TOO_MANY_USES.value)
        return verified

    def _check_approval(
        self, token: SignedToken, verified: Verified, *, operation: Operation, model_id: str | None,
        params: Mapping[str, object], now: float,
    ) -> Verified:  # fmt: skip
        """Return ``verified`` with what people signed: the statement and the proofs beside the members that the MAC covers."""
        digest, policy = _read_text(token.claims, "stmtDigest"), self.policy
        if policy is None:
            raise OpTokenError(Reason.NO_POLICY)
        proofs = token.extra.get("proofs")
        # What a node does not know beside the signed members, it cannot honour.
        if token.extra.keys() != {"statement", "proofs"} or not isinstance(proofs, list):
            raise OpTokenError(Reason.BAD_FIELD)
        try:
            statement = read_statement(decode_bytes(token.extra["statement"]))
            if not isinstance(policy, Policy):
                policy = policy(statement.policy)
            if policy is None:
                raise OpTokenError(Reason.NO_POLICY)
            if not hmac.compare_digest(statement.digest.hex().encode(), digest.encode()):
                raise OpTokenError(Reason.WRONG_STATEMENT)
            if self.runner_id not in statement.targets:
                raise OpTokenError(Reason.WRONG_TARGET)
            if statement.op_id != verified.op_id:
                raise OpTokenError(Reason.WRONG_STATEMENT)
            _check_statement_purpose(statement, operation, model_id, params)
            approvers = verify_approval(statement, proofs, policy, now=now).approved_by
            if verified.use > statement.max_uses:
                raise ApprovalError(Rule.TOO_MANY_USES, "every use that was approved is spent; ask for it again")
            daily_cap = find_class(statement, policy).daily_cap
        except ApprovalError as error:
            raise OpTokenError(Reason.NOT_APPROVED, rule=error.rule.value) from None
        if statement.requested_at > now + WIRE.token_skew_s:
            raise OpTokenError(Reason.NOT_YET_VALID)
        # A token can be made anew at any time, and its age says nothing of when the approval was first carried out.
        self._check_remembered(statement.requested_at)
        # A fence from the far future would keep every later operation from its slot.
        if verified.fence is not None and verified.fence > (now + WIRE.token_fence_lead_s) * 1000:
            raise OpTokenError(Reason.BAD_FIELD)
        return replace(
            verified, max_uses=statement.max_uses, statement=statement, approvers=approvers, op_class=statement.op_class,
            daily_cap=daily_cap, not_after=statement.not_after,
        )  # fmt: skip

    def _check_signature(self, token: SignedToken, level: Level) -> str:
        """Return the id of the key whose signature holds. The algorithm follows from the key; the token names none."""
        kid = "" if level is Level.L0 else token.claims.get("kid")
        if not isinstance(kid, str) or kid not in self.keys:
            raise OpTokenError(Reason.UNKNOWN_KEY)
        try:
            # The forms cannot be taken for each other: an encoding of claims begins with a brace, which no JWT has in it.
            signed = token.jwt_input
            if signed is None:
                signed = spec_bytes(token.claims) if level is Level.L0 else canonical_bytes(dict(token.claims))
        except NotCanonical:
            raise OpTokenError(Reason.MALFORMED) from None
        expected = hmac.digest(self.keys[kid], signed, "sha256")
        given = _read_mac(token.signature, level) if token.jwt_input is None else _read_jwt_mac(token.signature)
        if given is None or not hmac.compare_digest(given, expected):
            raise OpTokenError(Reason.BAD_SIGNATURE)
        return kid

    def _check_l0(self, claims: Mapping[str, Claim], now: float) -> int:
        issued_at = _read_integer(claims, "issuedAt", least=0)
        if issued_at < now - WIRE.token_age_s:
            raise OpTokenError(Reason.EXPIRED)
        if issued_at > now + WIRE.token_l0_skew_s:
            raise OpTokenError(Reason.NOT_YET_VALID)
        self._check_remembered(issued_at)
        return issued_at + WIRE.token_age_s

    def _check_jwt_claims(self, claims: Mapping[str, Claim], now: float) -> None:
        """Honour what RFC 7519 gives a meaning to, and refuse what is not known."""
        if not claims.keys() <= _JWT_L0_MEMBERS:
            raise OpTokenError(Reason.BAD_FIELD)
        if "aud" in claims and _read_text(claims, "aud") != self.runner_id:
            raise OpTokenError(Reason.WRONG_AUDIENCE)
        for name in ("iat", "nbf"):
            if name in claims and _read_integer(claims, name, least=0) > now + WIRE.token_l0_skew_s:
                raise OpTokenError(Reason.NOT_YET_VALID)
        # It only shortens a token's life: the age counts beside it.
        if "exp" in claims and _read_integer(claims, "exp", least=0) <= now:
            raise OpTokenError(Reason.EXPIRED)

    def _check_l1(self, claims: Mapping[str, Claim], now: float) -> int:
        if not claims.keys() <= _L1_MEMBERS:
            raise OpTokenError(Reason.BAD_FIELD)
        if _read_text(claims, "aud") != self.runner_id:
            raise OpTokenError(Reason.WRONG_AUDIENCE)
        issued_at = _read_integer(claims, "issuedAt", least=0)
        expires_at = _read_integer(claims, "exp", least=issued_at)
        if issued_at > now + WIRE.token_skew_s:
            raise OpTokenError(Reason.NOT_YET_VALID)
        if expires_at > issued_at + WIRE.token_age_s:
            raise OpTokenError(Reason.LIFETIME_TOO_LONG)
        if now > expires_at:
            raise OpTokenError(Reason.EXPIRED)
        self._check_remembered(issued_at)
        return expires_at

    def _check_remembered(self, at: int) -> None:
        if self.not_before is not None and at < self.not_before:
            raise OpTokenError(Reason.BEFORE_LEDGER)


def _read_level(token: SignedToken) -> Level:
    """Return the level of what a token carries; nothing of it is believed yet."""
    if "v" not in token.claims:
        return Level.L0
    if token.claims["v"] != TOKEN_VERSION:
        raise OpTokenError(Reason.UNKNOWN_VERSION)
    return Level.L2 if "statement" in token.extra else Level.L1


def _read_mac(text: str, level: Level) -> bytes | None:
    if _HEX_MAC.fullmatch(text):
        return bytes.fromhex(text)
    return None if level is Level.L0 else decode_base64url(text)


def _read_jwt_mac(text: str) -> bytes | None:
    return None if text.endswith("=") else decode_base64url(text)


def _check_purpose(claims: Mapping[str, Claim], operation: Operation, model_id: str | None) -> None:
    if _read_text(claims, "operation") != operation.value:
        raise OpTokenError(Reason.WRONG_OPERATION)
    if "modelId" in claims and claims["modelId"] is None and "v" in claims:
        raise OpTokenError(Reason.BAD_FIELD)
    permitted = claims.get("modelId")
    match operation:
        case Operation.SETTINGS_RELOAD:
            is_named_right = model_id is None
        case Operation.CACHE_FLUSH:
            is_named_right = True
        case _:
            is_named_right = bool(model_id)
    if permitted != model_id or not is_named_right:
        raise OpTokenError(Reason.WRONG_MODEL)


def _check_params(claims: Mapping[str, Claim], params: Mapping[str, object]) -> None:
    try:
        actual = params_digest(params)
    except NotCanonical:
        raise OpTokenError(Reason.UNSIGNABLE_PARAMS) from None
    if not hmac.compare_digest(_read_text(claims, "paramsDigest").encode(), actual.encode()):
        raise OpTokenError(Reason.WRONG_PARAMS)


def _read_signers(claims: Mapping[str, Claim]) -> tuple[str, ...]:
    listed = claims.get("signers")
    if not isinstance(listed, list) or len(listed) > WIRE.token_signers:
        raise OpTokenError(Reason.BAD_FIELD)
    names = [name.strip() for name in listed]
    if not all(0 < len(name) <= WIRE.token_text_chars for name in names):
        raise OpTokenError(Reason.BAD_FIELD)
    # One name twice is one signer.
    return tuple(dict.fromkeys(names))


def _read_text(claims: Mapping[str, Claim], name: str, *, shortest: int = 1) -> str:
    value = claims.get(name)
    if not isinstance(value, str) or not shortest <= len(value) <= WIRE.token_text_chars:
        raise OpTokenError(Reason.BAD_FIELD)
    return value


def _read_integer(claims: Mapping[str, Claim], name: str, *, least: int) -> int:
    value = claims.get(name)
    if not isinstance(value, int) or value < least:
        raise OpTokenError(Reason.BAD_FIELD)
    return value


def _check_statement_purpose(
    statement: Statement, operation: Operation, model_id: str | None, params: Mapping[str, object]
) -> None:
    if statement.operation != operation.value:
        raise OpTokenError(Reason.WRONG_OPERATION)
    covered = {name: value for name, value in params.items() if name != TOKEN_MEMBER and value is not None}
    try:
        actual = canonical(covered)
    except ApprovalError:
        raise OpTokenError(Reason.UNSIGNABLE_PARAMS) from None
    # Compared as bytes, because 1 and true are equal in Python and not in what people signed.
    if actual != canonical(dict(statement.params)):
        raise OpTokenError(Reason.WRONG_PARAMS)
    if statement.params.get("modelId") != model_id:
        raise OpTokenError(Reason.WRONG_MODEL)
