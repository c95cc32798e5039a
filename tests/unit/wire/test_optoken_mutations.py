"""Thousands of mutants of a valid token of each level: the verifier takes only those that mean the same.

MUSTER_TEST_MUTATIONS: how many of each kind of token.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import os
import random
import string
from collections import Counter
from typing import Any

import pytest

from tests.fakes.policies import approve, edit_statement, make_policy, make_statement
from tests.fakes.signed_tokens import BOX, PARAMS, PEOPLE, Token, make_l0, make_l1, make_l2, make_verifier, sign_claims, verify
from wire.optoken import Level, OpTokenError, encode_token, read_token
from wire.optoken.approval import ApprovalError, decode_bytes, encode_bytes
from wire.optoken.proposal import DEFAULT_CLASSES

ROUNDS = int(os.environ.get("MUSTER_TEST_MUTATIONS", "400"))
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**53 - 1, 2**64, 1.0, "", " ", "*", "1", "ada", "admin1", "zoe", "webauthn", "ed25519",
    "model-unload", [], ["ada"], ["a", "b"], [1], [[]], {}, {"a": 1}, "\x00", "ä", "\ud800", "=", "AA", "A" * 400, "L0", 300,
    "box-7", float("nan"),
)  # fmt: skip


def flip_a_bit(token: Token, chance: random.Random) -> str:
    content = bytearray(json.dumps(token).encode())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return content.decode("latin-1")


def flip_a_bit_in_base64url(token: Token, chance: random.Random) -> str:
    content = bytearray(encode_token(token).encode())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return content.decode("latin-1")


def swap_a_character(token: Token, chance: random.Random) -> str:
    text = json.dumps(token)
    at = chance.randrange(len(text))
    return text[:at] + chance.choice(string.printable) + text[at + chance.randrange(2) :]


def put_an_odd_claim(token: Token, chance: random.Random) -> Token:
    holder = chance.choice([token, token["opToken"], token["opToken"]])
    holder[chance.choice(sorted(holder))] = copy.deepcopy(chance.choice(ODD))
    return token


def edit_a_value(token: Token, chance: random.Random) -> Token:
    claims = token["opToken"]
    name = chance.choice(sorted(claims))
    match claims[name]:
        case int(number):
            claims[name] = number + chance.choice([-1, 1, 60, -300, 10**6])
        case str(text):
            at = chance.randrange(len(text) + 1)
            claims[name] = text[:at] + chance.choice(string.printable) + text[at + chance.randrange(2) :]
        case list(items):
            claims[name] = chance.choice([items[::-1], [*items, "admin3"], items[:1], [*items, items[0]], [items]])
    return token


def drop_or_rename_or_add(token: Token, chance: random.Random) -> Token:
    claims = token["opToken"]
    name = chance.choice(sorted(claims))
    match chance.randrange(4):
        case 0:
            del claims[name]
        case 1:
            claims[name.upper()] = claims.pop(name)
        case 2:
            claims[name + "_"] = claims[name]
        case _:
            token["opToken"] = {name: claims}
    return token


def swap_two_values(token: Token, chance: random.Random) -> Token:
    claims = token["opToken"]
    one, two = chance.sample(sorted(claims), 2)
    claims[one], claims[two] = claims[two], claims[one]
    return token


def say_a_key_twice(token: Token, chance: random.Random) -> str:
    claims = token["opToken"]
    name = chance.choice(sorted(claims))
    text = json.dumps(token)
    twice = f'"{name}": {json.dumps(chance.choice(ODD))}, '
    return text.replace('{"operation"', "{" + twice + '"operation"', 1)


def change_the_signature(token: Token, chance: random.Random) -> Token:
    signature = token["signature"]
    match chance.randrange(5):
        case 0:
            token["signature"] = signature[: chance.randrange(len(signature))]
        case 1:
            token["signature"] = signature + chance.choice(string.printable)
        case 2:
            token["signature"] = signature.swapcase()
        case 3:
            token["signature"] = base64.b64encode(chance.randbytes(32)).decode()
        case _:
            token["signature"] = chance.randbytes(32).hex()
    return token


def shuffle_the_claims(token: Token, chance: random.Random) -> str:
    claims = list(token["opToken"].items())
    chance.shuffle(claims)
    shuffled = {"x" * chance.randrange(1, 9): chance.randrange(9), "signature": token["signature"], "opToken": dict(claims)}
    return json.dumps(shuffled, indent=chance.choice([None, 1]), ensure_ascii=chance.random() < 0.5)


OF_CLAIMS = (
    flip_a_bit, flip_a_bit_in_base64url, swap_a_character, put_an_odd_claim, edit_a_value, drop_or_rename_or_add,
    swap_two_values, say_a_key_twice, change_the_signature, shuffle_the_claims,
)  # fmt: skip


def meaning_of_claims(token: object) -> tuple[object, bytes]:
    """The claims, and the bytes of the signature, which has two spellings at L1."""
    read = read_token(token)
    text = read.signature
    return dict(read.claims), bytes.fromhex(text) if len(text) == 64 else base64.urlsafe_b64decode(text + "=")


@pytest.mark.timeout(max(240, ROUNDS // 20))
@pytest.mark.parametrize(("level", "token"), [(Level.L0, make_l0()), (Level.L1, make_l1())], ids=["L0", "L1"])
def test_of_mutated_tokens_without_approvals_only_those_of_the_same_meaning_are_accepted(level: Level, token: Token) -> None:
    chance = random.Random(f"mutations of {level}")
    verifier = make_verifier(level)
    original = meaning_of_claims(token)
    accepted: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for number in range(ROUNDS):
        mutate = OF_CLAIMS[number % len(OF_CLAIMS)]
        mutant = mutate(copy.deepcopy(token), chance)
        try:
            verify(mutant, verifier)
        except OpTokenError:
            refused[mutate.__name__] += 1
        else:
            assert meaning_of_claims(mutant) == original, (mutate.__name__, mutant)
            accepted[mutate.__name__] += 1
    share = ROUNDS // len(OF_CLAIMS)
    # The harness itself: the harmless change always passes, a doubled key never, and each kind was refused or harmless.
    assert accepted["shuffle_the_claims"] == share
    assert refused["say_a_key_twice"] == share
    assert sum(accepted.values()) + sum(refused.values()) == ROUNDS
    assert sum(refused.values()) > 0.8 * ROUNDS


THREE = make_policy(PEOPLE, classes={"model-load": {**DEFAULT_CLASSES["model-load"], "threshold": 3}})
ADA = PEOPLE[0]
STATEMENT = make_statement(THREE, params=PARAMS, targets=[BOX])
PROOFS = [*approve(STATEMENT, PEOPLE[:2]), PEOPLE[2].approve(STATEMENT, key=PEOPLE[2].key_file)]
OTHER = edit_statement(STATEMENT, opId="op-2")
BY_EVERY_KEY = [ADA.approve(STATEMENT, key=key) for key in (ADA.passkey, ADA.second, ADA.key_file)]
OF_OTHER = [person.approve(OTHER, key=key) for person in PEOPLE[:3] for key in (person.passkey, person.key_file)]
TOKEN = make_l2(statement=STATEMENT, proofs=PROOFS)
VERIFIER = make_verifier(Level.L2, policy=THREE)


def resigned(token: Token) -> Token:
    """The token as an issuer would sign it who wants it accepted: claims about the statement follow the statement."""
    try:
        digest = hashlib.sha256(b"op-statement/v1\x00" + decode_bytes(token.get("statement"))).hexdigest()
    except ApprovalError:
        digest = "0" * 64
    return {**token, **sign_claims({**token["opToken"], "stmtDigest": digest})}


# Without the issuer's key: the whole token


def edit_a_claim(token: Token, chance: random.Random) -> Token:
    name = chance.choice(sorted(token["opToken"]))
    token["opToken"][name] = chance.choice(ODD)
    return token


def drop_a_part(token: Token, chance: random.Random) -> Token:
    holder = chance.choice([token, token["opToken"], *token["proofs"]])
    del holder[chance.choice(sorted(holder))]
    return token


def swap_two_parts(token: Token, chance: random.Random) -> Token:
    holder = chance.choice([token, token["opToken"], *token["proofs"]])
    one, two = chance.sample(sorted(holder), 2)
    holder[one], holder[two] = holder[two], holder[one]
    return token


def say_a_name_twice(token: Token, chance: random.Random) -> str:
    name = chance.choice(["statement", "proofs", "opToken", "signature"])
    twice = f'"{name}": {json.dumps(token[name])}, '
    return json.dumps(token).replace("{", "{" + twice, 1)


# With the issuer's key: statement and proofs


def alter_the_statement(token: Token, chance: random.Random) -> Token:
    raw = bytearray(STATEMENT.raw)
    at = chance.randrange(len(raw))
    match chance.randrange(3):
        case 0:
            raw[at] ^= 1 << chance.randrange(8)
        case 1:
            raw[at : at + 1] = chance.choice(string.printable).encode() * chance.randrange(3)
        case _:
            digits = [place for place, byte in enumerate(raw) if chr(byte).isdigit()]
            raw[chance.choice(digits)] = ord(chance.choice(string.digits))
    return resigned({**token, "statement": encode_bytes(bytes(raw))})


def alter_the_base64url(token: Token, chance: random.Random) -> Token:
    holder = chance.choice([token, *token["proofs"]])
    name = chance.choice([name for name in ("statement", "signature", "clientDataJSON", "authenticatorData") if name in holder])
    text = holder[name]
    at = chance.randrange(len(text))
    match chance.randrange(4):
        case 0:
            holder[name] = text + chance.choice(["=", "==", "\n", " ", "A"])
        case 1:
            holder[name] = text[:at] + chance.choice(string.ascii_letters + "-_+/") + text[at + 1 :]
        case 2:
            holder[name] = text[:at]
        case _:
            last = string.ascii_uppercase + string.ascii_lowercase + string.digits + "-_"
            holder[name] = text[:-1] + last[(last.index(text[-1]) + chance.randrange(1, 4)) % 64]
    return resigned(token) if holder is not token else token


def put_something_odd(token: Token, chance: random.Random) -> Token:
    holder = chance.choice([token, *token["proofs"]])
    name = chance.choice(sorted(set(holder) - {"opToken", "signature"} if holder is token else holder))
    holder[name] = copy.deepcopy(chance.choice(ODD))
    return resigned(token)


def flip_a_bit_of_a_proof(token: Token, chance: random.Random) -> Token:
    proof = chance.choice(token["proofs"])
    name = chance.choice([name for name in ("signature", "clientDataJSON", "authenticatorData") if name in proof])
    raw = bytearray(decode_bytes(proof[name]))
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    proof[name] = encode_bytes(bytes(raw))
    return resigned(token)


def swap_between_proofs(token: Token, chance: random.Random) -> Token:
    one, two = chance.sample(token["proofs"], 2)
    name = chance.choice(["signature", "approver", "keyid", "clientDataJSON", "authenticatorData", "type"])
    if one.get(name) == two.get(name):
        name = "signature"
    one[name], two[name] = two.get(name), one.get(name)
    return resigned(token)


def count_somebody_twice(token: Token, chance: random.Random) -> Token:
    token["proofs"][0] = chance.choice(BY_EVERY_KEY[1:3])
    token["proofs"][chance.choice([1, 2])] = chance.choice(BY_EVERY_KEY[:3])
    return resigned(token)


def bring_proofs_of_another_statement(token: Token, chance: random.Random) -> Token:
    at = chance.randrange(3)
    token["proofs"][at] = chance.choice(OF_OTHER[2 * at : 2 * at + 2])
    return resigned(token)


def shuffle_what_means_nothing(token: Token, chance: random.Random) -> str:
    chance.shuffle(token["proofs"])
    members = list(token.items())
    chance.shuffle(members)
    return json.dumps(dict(members), indent=chance.choice([None, 1]), ensure_ascii=chance.random() < 0.5)


OF_STRANGERS = (flip_a_bit, flip_a_bit_in_base64url, edit_a_claim, drop_a_part, swap_two_parts, say_a_name_twice)
OF_THE_ISSUER = (
    alter_the_statement, alter_the_base64url, put_something_odd, flip_a_bit_of_a_proof, swap_between_proofs,
    count_somebody_twice, bring_proofs_of_another_statement, shuffle_what_means_nothing,
)  # fmt: skip


def meaning(token: object) -> object:
    """What an accepted mutant must share with the original: all but the order of the proofs and the spelling of the MAC."""
    read = read_token(token)
    proofs: Any = read.extra["proofs"]
    mac = bytes.fromhex(read.signature) if len(read.signature) == 64 else base64.urlsafe_b64decode(read.signature + "=")
    ordered = sorted(json.dumps(proof, sort_keys=True) for proof in proofs)
    return dict(read.claims), mac, read.extra["statement"], ordered


@pytest.mark.timeout(max(240, ROUNDS // 20))
@pytest.mark.parametrize("mutations", [OF_STRANGERS, OF_THE_ISSUER], ids=["strangers", "issuer"])
def test_of_mutated_tokens_with_approvals_only_those_of_the_same_meaning_are_accepted(mutations: Any) -> None:
    chance = random.Random(f"mutations at L2 {len(mutations)}")
    original = meaning(TOKEN)
    accepted: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for number in range(ROUNDS):
        mutate = mutations[number % len(mutations)]
        mutant = mutate(copy.deepcopy(TOKEN), chance)
        try:
            verify(mutant, VERIFIER)
        except OpTokenError as error:
            refused[mutate.__name__] += 1
            refused[str(error)] += 1
        else:
            assert meaning(mutant) == original, (mutate.__name__, mutant)
            accepted[mutate.__name__] += 1
    assert sum(accepted[mutate.__name__] + refused[mutate.__name__] for mutate in mutations) == ROUNDS
    # The harness itself: the harmless change always passes, and every other kind is refused nearly always.
    for mutate in mutations:
        if mutate is shuffle_what_means_nothing:
            assert refused[mutate.__name__] == 0
        else:
            assert refused[mutate.__name__] > 0.8 * ROUNDS / len(mutations), mutate.__name__
    if mutations is OF_THE_ISSUER:
        wanted = {"bad_proof", "bad_proof_signature", "wrong_challenge", "unknown_key", "duplicate_proof"}
        assert wanted <= {reason.removeprefix("not_approved (").rstrip(")") for reason in refused}


def test_the_token_that_is_mutated_is_valid() -> None:
    assert verify(TOKEN, VERIFIER).approvers == ("ada", "bob", "cleo")
    assert verify(resigned(TOKEN), VERIFIER).approvers == ("ada", "bob", "cleo")
