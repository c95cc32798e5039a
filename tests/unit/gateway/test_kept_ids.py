"""What kept answers are called: their ids open them to every key of the tenant, so nobody finds them out from a record."""

from __future__ import annotations

import json
import uuid

import pytest

from gateway.dialects.translation import AnswerContext
from gateway.keeping import Keeping, plan_keeping
from gateway.values import Caller
from tests.unit.gateway.responses_reader import ask

CALLER = Caller(uuid.uuid4(), "k", "acme", 60, frozenset(), stores_responses=True)
REQUEST_ID = "req_0199f6a2c0de7000a000000000000001"
CHAT = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}  # fmt: skip


def name_answer(plan: Keeping) -> str:
    answer = plan.translate(ask()).open_answer(AnswerContext(request_id=REQUEST_ID, model="m", created=1_795_000_000))
    return str(json.loads(answer.translate_whole(json.dumps(CHAT).encode()))["id"])


@pytest.mark.asyncio
async def test_the_id_of_a_kept_answer_does_not_follow_from_that_of_its_request() -> None:
    plans = [await plan_keeping(CALLER, ask(), REQUEST_ID) for _ in range(2)]
    names = [name_answer(plan) for plan in plans if plan is not None]
    assert len(set(names)) == 2
    assert not any(REQUEST_ID.removeprefix("req_") in name for name in names)
    assert all(name.startswith("resp_") and len(name) >= 5 + 32 for name in names)
    assert plans[0] is not None
    assert name_answer(plans[0]) == names[0], "every attempt of one request gives the same"
