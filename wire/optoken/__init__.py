"""Operation tokens: what a box must be shown before it loads, unloads or flushes. Format, signing, verification; pure.

L0 is the exchange format of public model runners: one shared key, parameters unsigned. L1 binds the token to one box, to the
parameters of the request, to one approval and to an order. What a box remembers between tokens is not kept here.
"""

from wire.optoken.canonical import NotCanonical, params_digest
from wire.optoken.refusal import OpTokenError, Reason
from wire.optoken.signing import Binding, Grant, sign_l0, sign_l1
from wire.optoken.token import MAX_TOKEN_BYTES, SignedToken, encode_token, read_token
from wire.optoken.verifier import MIN_KEY_BYTES, Level, Operation, Verified, Verifier

__all__ = [
    "MAX_TOKEN_BYTES",
    "MIN_KEY_BYTES",
    "Binding",
    "Grant",
    "Level",
    "NotCanonical",
    "OpTokenError",
    "Operation",
    "Reason",
    "SignedToken",
    "Verified",
    "Verifier",
    "encode_token",
    "params_digest",
    "read_token",
    "sign_l0",
    "sign_l1",
]
