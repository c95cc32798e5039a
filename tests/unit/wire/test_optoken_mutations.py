"""Ten thousand tokens that are almost right."""

from __future__ import annotations

import base64
import copy
import json
import os
import random
import string
from collections import Counter
from typing import Any

import pytest

from tests.fakes.signed_tokens import Token, make_l0, make_l1, make_verifier, verify
from wire.optoken import Level, OpTokenError, encode_token, read_token

ROUNDS = int(os.environ.get("MUSTER_TEST_MUTATIONS", "5000"))
"""Of each kind of token."""
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**53 - 1, 2**64, 1.0, "", " ", "*", "1", "admin1", "model-unload", [], ["admin1"], ["a", "b"],
    [1], {}, {"a": 1}, "\x00", "ä", "\ud800", float("nan"), "L0", 300,
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


def put_something_odd(token: Token, chance: random.Random) -> Token:
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
    twice = f'"{name}": {json.dumps(chance.choice(ODD[:20]))}, '
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


def shuffle_what_means_nothing(token: Token, chance: random.Random) -> str:
    claims = list(token["opToken"].items())
    chance.shuffle(claims)
    shuffled = {"x" * chance.randrange(1, 9): chance.randrange(9), "signature": token["signature"], "opToken": dict(claims)}
    return json.dumps(shuffled, indent=chance.choice([None, 1]), ensure_ascii=chance.random() < 0.5)


MUTATIONS = (
    flip_a_bit, flip_a_bit_in_base64url, swap_a_character, put_something_odd, edit_a_value, drop_or_rename_or_add,
    swap_two_values, say_a_key_twice, change_the_signature, shuffle_what_means_nothing,
)  # fmt: skip


def meaning(token: object) -> tuple[object, bytes]:
    """The claims, and the bytes of the signature, which has two spellings at L1."""
    read = read_token(token)
    text = read.signature
    return dict(read.claims), bytes.fromhex(text) if len(text) == 64 else base64.urlsafe_b64decode(text + "=")


@pytest.mark.timeout(max(240, ROUNDS // 20))
@pytest.mark.parametrize(("level", "token"), [(Level.L0, make_l0()), (Level.L1, make_l1())], ids=["L0", "L1"])
def test_of_thousands_of_mutated_tokens_only_those_of_the_same_meaning_are_accepted(level: Level, token: Token) -> None:
    chance = random.Random(f"mutations of {level}")
    verifier = make_verifier(level)
    original = meaning(token)
    accepted: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for number in range(ROUNDS):
        mutate = MUTATIONS[number % len(MUTATIONS)]
        mutant = mutate(copy.deepcopy(token), chance)
        try:
            verify(mutant, verifier)
        except OpTokenError:
            refused[mutate.__name__] += 1
        else:
            assert meaning(mutant) == original, (mutate.__name__, mutant)
            accepted[mutate.__name__] += 1
    share = ROUNDS // len(MUTATIONS)
    # The harness itself: the harmless change always passes, a doubled key never, and each kind was refused or harmless.
    assert accepted["shuffle_what_means_nothing"] == share
    assert refused["say_a_key_twice"] == share
    assert sum(accepted.values()) + sum(refused.values()) == ROUNDS
    assert sum(refused.values()) > 0.8 * ROUNDS
