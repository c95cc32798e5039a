"""Why a token is refused: one reason per check, for the log of the box and for tests. Outside, all reasons look the same."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The check that failed first."""

    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    """Not an object, its JSON text or base64url of it; or JSON beyond the strict subset."""
    DUPLICATE_KEY = "duplicate_key"
    BAD_FIELD = "bad_field"
    """A member is missing, of the wrong type, out of range, or unknown in a format that is closed."""
    UNKNOWN_VERSION = "unknown_version"
    LEVEL_TOO_LOW = "level_too_low"
    UNKNOWN_KEY = "unknown_key"
    BAD_SIGNATURE = "bad_signature"
    WRONG_AUDIENCE = "wrong_audience"
    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"
    LIFETIME_TOO_LONG = "lifetime_too_long"
    BEFORE_LEDGER = "before_ledger"
    """Issued, or at L2 asked for, before this box began to remember operations, so it may have been carried out already."""
    WRONG_OPERATION = "wrong_operation"
    WRONG_MODEL = "wrong_model"
    UNSIGNABLE_PARAMS = "unsignable_params"
    """The request has a parameter without canonical form (a float); no token can cover it."""
    WRONG_PARAMS = "wrong_params"
    TOO_FEW_SIGNERS = "too_few_signers"
    REPLAYED = "replayed"
    STALE_FENCE = "stale_fence"
    LEDGER_FULL = "ledger_full"
    NO_POLICY = "no_policy"
    """This box wants proofs and has no policy yet to judge them by."""
    WRONG_STATEMENT = "wrong_statement"
    """The statement is not the one that the token was issued for."""
    WRONG_TARGET = "wrong_target"
    """People approved this for other boxes."""
    NOT_APPROVED = "not_approved"
    """The proofs do not make an approval; ``OpTokenError.rule`` says which rule refused them."""


class OpTokenError(Exception):
    """A token that is not accepted. The text is the reason, with the rule where there is one: nothing of the token.

    ``rule``: a value of ``approval.Rule``, or "".
    """

    def __init__(self, reason: Reason, *, rule: str = "") -> None:
        super().__init__(f"{reason.value} ({rule})" if rule else reason.value)
        self.reason = reason
        self.rule = rule
