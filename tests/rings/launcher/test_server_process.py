"""``python -m controlplane.serve_control`` as the launcher starts it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.fakes.control_process import ServerProcess, free_port, serve_control
from tests.fakes.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]


def look_at_health(server: ServerProcess) -> tuple[int, object]:
    """Return status and words of its health, which counts as away what does not answer within a second or three."""
    answer = httpx.get(f"{server.url}/healthz", timeout=30)
    return answer.status_code, answer.json()


def test_it_serves_pages_static_files_and_health_and_stops_with_zero(tmp_path: Path) -> None:
    with serve_control(tmp_path / "control.log") as server, httpx.Client(base_url=server.url, timeout=30) as client:
        wait_until(lambda: client.get("/healthz").json()["ok"], what="its health is good")
        assert "Sign in" in client.get("/sign-in/").text
        assert client.get("/static/muster/admin.css").status_code == 200
        assert client.get("/static/unfold/css/styles.css").status_code == 200
        assert client.get("/requests").json()["error"]["code"] == "INVALID_ADMIN_TOKEN"
        assert server.terminate() == 0
        assert "Traceback" not in server.log.read_text()


def test_without_its_database_it_says_503_and_lives(tmp_path: Path) -> None:
    nowhere = f"postgresql://muster@127.0.0.1:{free_port()}/muster"
    with serve_control(tmp_path / "control.log", env={"DATABASE_URL": nowhere}) as server:
        said = {"ok": False, "service": "control", "database": "unreachable", "redis": "ok"}
        wait_until(lambda: look_at_health(server) == (503, said), what="it misses its database, and nothing else")


def test_without_redis_it_is_degraded_and_not_down(tmp_path: Path) -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    with serve_control(tmp_path / "control.log", env={"REDIS_URL": nowhere}) as server:
        said = {"ok": True, "service": "control", "database": "ok", "redis": "unreachable"}
        wait_until(lambda: look_at_health(server) == (200, said), what="it misses Redis, and nothing else")


def test_every_request_is_one_line_when_that_is_asked_for(tmp_path: Path) -> None:
    with serve_control(tmp_path / "control.log", "--access-log") as server:
        httpx.get(f"{server.url}/healthz", timeout=30)
        assert server.terminate() == 0
        assert "GET /healthz" in server.log.read_text()
