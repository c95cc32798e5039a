"""The load client finds every way in which a stream can go wrong, and finds nothing when nothing is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.loadclient import LoadResult, LoadSpec, Target, run_load
from benchmarks.toolchain import Tools, build_tools, find_compiler
from benchmarks.upstream import MockUpstream, Pace

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="the tools are C programs and there is no compiler")

CHUNKS = 10
STREAMS = LoadSpec(connections=4, seconds=0.1, is_streaming=True)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    return build_tools(tmp_path_factory.mktemp("build"))


@pytest.fixture
def mock(tools: Tools, tmp_path: Path) -> Iterator[MockUpstream]:
    upstream = MockUpstream(tools, log_dir=tmp_path)
    upstream.set_pace(Pace(chunks=CHUNKS, delay_us=100))
    yield upstream
    upstream.stop()


def load(tools: Tools, mock: MockUpstream, spec: LoadSpec = STREAMS) -> LoadResult:
    return run_load(tools.load, Target(mock.port), spec)


def test_whole_streams_are_counted_and_have_no_problems(tools: Tools, mock: MockUpstream) -> None:
    result = load(tools, mock)
    assert result.answered > 0
    assert result.chunks == result.answered * CHUNKS == mock.read_counters()["chunks"]
    assert result.find_problems() == []
    assert 0 < result.ttfb_us.p50 <= result.latency_us.p50


def test_whole_answers_are_verified_too(tools: Tools, mock: MockUpstream) -> None:
    result = load(tools, mock, LoadSpec(connections=2, seconds=0.1, is_streaming=False))
    assert result.answered > 0
    assert result.chunks == result.answered == mock.read_counters()["requests"]
    assert result.find_problems() == []


@pytest.mark.parametrize(
    ("fault", "field", "word"),
    [
        ("lose", "lost", "chunks lost"),
        ("duplicate", "duplicated", "chunks duplicated"),
        ("swap", "reordered", "chunks reordered"),
        ("foreign", "foreign", "chunks of another stream"),
    ],
)
def test_one_bad_chunk_in_each_stream_is_reported(tools: Tools, mock: MockUpstream, fault: str, field: str, word: str) -> None:
    mock.set_fault(fault)
    result = load(tools, mock)
    assert result.answered > 0
    assert getattr(result, field) == result.answered
    assert f"{result.answered} {word}" in result.find_problems()
    others = {"lost", "duplicated", "reordered", "foreign"} - {field}
    if fault == "foreign":  # what went to another stream is missing from its own
        others.discard("lost")
    assert all(getattr(result, other) == 0 for other in others)


def test_a_stream_that_is_cut_off_is_an_error_and_its_rest_is_lost(tools: Tools, mock: MockUpstream) -> None:
    mock.set_fault("cut")
    result = load(tools, mock)
    assert result.answered == 0
    assert result.errors > 0
    assert result.lost == result.errors * (CHUNKS - CHUNKS // 2)
    assert "no answer at all" in result.find_problems()


def test_a_bad_status_is_reported_with_the_body(tools: Tools, tmp_path: Path, mock: MockUpstream) -> None:
    from benchmarks.nginx import Nginx, find_nginx

    binary = find_nginx()
    if binary is None:
        pytest.skip("nginx is not installed")
    tmp_path.chmod(0o755)
    peer = Nginx(binary, upstream_port=mock.port, work_dir=tmp_path)
    try:
        refused = run_load(tools.load, Target(peer.port, key="wrong"), STREAMS)
    finally:
        peer.stop()
    assert refused.last_bad_status == 401
    assert refused.answered == 0
    assert any("status 401" in problem for problem in refused.find_problems())


def test_a_server_that_is_gone_is_an_error_and_not_a_hang(tools: Tools, mock: MockUpstream) -> None:
    mock.stop()
    result = load(tools, mock)
    assert result.answered == 0
    assert result.errors > 0


def test_without_a_compiler_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.errors import BenchmarkError

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(BenchmarkError, match="no C compiler found"):
        build_tools(tmp_path / "build")
