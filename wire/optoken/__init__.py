"""Operation tokens: what a node must be shown before it loads, unloads or flushes. Format, signing, verification; pure.

L0 is the exchange format of public model runners: one shared key, parameters unsigned. L1 binds the token to one node, to the
parameters of the request, to one approval and to an order. L2 carries what people signed and their proofs, so that whoever
holds every key of the issuer still cannot operate the node. What a node remembers between tokens is not kept here.

``approval`` stands alone: it judges statements, policies and proofs, here and for an auditor.
"""

from wire.optoken.approval import ApprovalError, Policy, Rule, Statement
from wire.optoken.op_token import (
    Binding,
    Grant,
    NotCanonical,
    OpTokenError,
    Reason,
    SignedToken,
    encode_token,
    make_runner_id,
    owns_runner_id,
    params_digest,
    read_token,
    sign_jwt,
    sign_l0,
    sign_l1,
    sign_l2,
)
from wire.optoken.verifier import Level, Operation, Verified, Verifier

__all__ = [
    "ApprovalError",
    "Binding",
    "Grant",
    "Level",
    "NotCanonical",
    "OpTokenError",
    "Operation",
    "Policy",
    "Reason",
    "Rule",
    "SignedToken",
    "Statement",
    "Verified",
    "Verifier",
    "encode_token",
    "make_runner_id",
    "owns_runner_id",
    "params_digest",
    "read_token",
    "sign_jwt",
    "sign_l0",
    "sign_l1",
    "sign_l2",
]
