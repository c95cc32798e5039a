"""The rows can fail: an engine with nothing in front of it lacks what a gateway is for, and the table says so."""

from __future__ import annotations

import pytest

from conformance.engine.server import MESSAGES, RESPONSES, serve_engine
from conformance.exchange import Finding, Verdict
from conformance.report import run_rows
from conformance.table import Row, Surface, Target, list_rows

pytestmark = pytest.mark.asyncio
SILENCE_S = 0.3
NOT_AN_ENGINES = {
    "chat.broken.cut": "breaks off", "chat.reply.cut": "status 200",
    "chat.request.key_stays": "the engine got the client's key",
    "errors.engine.bad_request": "code must be a string and is 400", "errors.engine.detail": "error is missing",
    "errors.engine.empty": "500 as text/plain", "errors.engine.html": "the page is in the answer",
    "errors.engine.text": "must be an object", "errors.models_key": "answers 200, 401 is due",
    "errors.request_id": "has no x-request-id", "errors.route": "404 as text/plain",
    "errors.wrong_key.messages": "answers 200, 401 is due", "framing.keep_alive.chat": "nothing came before the answer",
    "framing.keep_alive_form.messages": "no comment line and no ping",
    "framing.keep_alive_middle.responses": "nothing came within the answer",
    "framing.not_buffered.chat": "x-accel-buffering is ''", "framing.split_events.messages": "write 0 ends inside an event",
    "messages.failed.answer_too_long": "type is missing", "messages.failed.context": "type is missing",
    "messages.failed.cut": "breaks off", "messages.failed.foreign_type": "type must be",
    "messages.request.max_tokens": "answers 200, 400 is due", "models.anthropic": "type is missing",
    "models.one": "answers 404, 200 is due", "responses.failed.cut": "breaks off",
    "responses.failed.context": 'code must be "context_length_exceeded"',
    "responses.request.no_input": "answers 200, 400 is due",
    "responses.request.unknown_previous": "answers 200, 404 or 400 is due",
}  # fmt: skip
AN_ENGINES = (
    "chat.reply", "chat.stream", "chat.tools", "chat.leave", "completions", "embeddings", "rerank", "responses.reply",
    "responses.stream", "messages.reply", "messages.stream", "images",
)  # fmt: skip


async def check(rows: list[Row], *, everything: bool = False) -> dict[str, Finding]:
    async with serve_engine(native=[MESSAGES, RESPONSES]) as url:
        target = Target(base_url=url, api_key="a-key", model="scripted", scripted=True, silence_s=SILENCE_S)
        required = list(Surface) if everything else []
        return {finding.row_id: finding for finding in await run_rows(target, rows, required=required)}


async def test_what_is_missing_fails_with_the_reason() -> None:
    rows = [row for row in list_rows() if row.id in NOT_AN_ENGINES]
    assert len(rows) == len(NOT_AN_ENGINES)
    found = await check(rows)
    for row_id, words in NOT_AN_ENGINES.items():
        assert found[row_id].verdict is Verdict.FAIL, row_id
        assert words in found[row_id].detail


async def test_what_an_engine_says_well_passes() -> None:
    found = await check([row for row in list_rows(AN_ENGINES) if row.id not in NOT_AN_ENGINES])
    assert {row_id: one.detail for row_id, one in found.items() if one.verdict is not Verdict.OK} == {}


async def test_a_surface_that_is_not_there_is_skipped_or_missed() -> None:
    rows = list_rows(["count_tokens"])
    for everything, verdict in ((False, Verdict.SKIPPED), (True, Verdict.FAIL)):
        found = await check(rows, everything=everything)
        assert {finding.verdict for finding in found.values()} == {verdict}
        assert all("the server has no /v1/messages/count_tokens (404)" in finding.detail for finding in found.values())


async def test_without_the_script_its_rows_are_skipped() -> None:
    async with serve_engine() as url:
        target = Target(base_url=url, api_key="a-key", model="scripted")
        rows = list_rows(["chat.stream", "responses"])
        found = await run_rows(target, rows)
    reasons = {row.id: finding for row, finding in zip(rows, found, strict=True) if row.needs_script}
    assert {finding.detail for finding in reasons.values()} == {"needs the scripted engine (--scripted)"}
    others = {
        finding.detail[:31] for finding in found if finding.row_id.startswith("responses") and finding.row_id not in reasons
    }
    assert others == {"the server has no /v1/responses"}


async def test_a_fault_that_the_engine_has_itself_is_told_from_one_of_the_server() -> None:
    native, sound = ("messages.failed.foreign_type", "responses.failed.context"), "chat.reply.head"
    rows = [row for row in list_rows() if row.id in {*native, sound}]
    async with serve_engine(native=[MESSAGES, RESPONSES]) as url, serve_engine() as elsewhere:
        server = Target(base_url=url, api_key="a-key", model="scripted", scripted=True)
        other = Target(base_url=elsewhere, api_key="none", model="scripted", scripted=True)
        of_engine = {one.row_id: one for one in await run_rows(server, rows, engine=server)}
        of_server = {one.row_id: one for one in await run_rows(server, rows, engine=other)}
    for row_id in native:
        assert of_engine[row_id].verdict is Verdict.ENGINE
        assert of_engine[row_id].detail == f"engine: {of_server[row_id].detail.partition(' (the engine')[0]}"
        assert of_server[row_id].verdict is Verdict.FAIL
    assert of_engine[sound].verdict is of_server[sound].verdict is Verdict.OK
