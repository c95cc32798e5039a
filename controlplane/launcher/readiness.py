"""Cheap questions to a part that tell whether it serves."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from core.limits import limits


def fetch(host: str, port: int, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes] | None:
    """Return status and body of a GET, or None when nobody gives an HTTP answer within a second or two.

    HTTP/1.0 by hand: ``http.client`` would keep TLS and mail parsing in the supervisor's memory for good.
    """
    lines = [f"GET {path} HTTP/1.0", f"Host: {host}:{port}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    try:
        with socket.create_connection((host, port), timeout=limits().launcher.ready_answer_s) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
            answer = b""
            while len(answer) < limits().launcher.ready_answer_bytes and (piece := connection.recv(65536)):
                answer += piece
    except OSError:
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return None
    return int(words[1]), body


def answers_ok(host: str, port: int, path: str) -> bool:
    """Return whether a GET of ``path`` is answered with 200."""
    answer = fetch(host, port, path)
    return answer is not None and answer[0] == 200


def lists_model(host: str, port: int, *, api_key: str, model: str) -> bool:
    """Return whether the gateway lists ``model`` to the holder of ``api_key``."""
    answer = fetch(host, port, "/v1/models", {"Authorization": f"Bearer {api_key}"})
    if answer is None or answer[0] != 200:
        return False
    try:
        entries = json.loads(answer[1])["data"]
        return any(entry.get("id") == model for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def names_process(path: Path, pid: int) -> bool:
    """Return whether process ``pid`` wrote its id into ``path``; what an earlier process left there does not count."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip() == str(pid)
    except OSError:
        return False


def describe_unreachable(url: str, *, default_port: int) -> str:
    """Return why nothing answers at the server that ``url`` names, or an empty text when something does.

    Understands ``scheme://host:port``, ``unix:///path`` and ``postgresql://…?host=/directory``.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    host = query.get("host") or parts.hostname or ""
    try:
        port = int(query.get("port") or parts.port or default_port)
    except ValueError:
        return "its port is not a number"
    try:
        if parts.scheme == "unix" or host.startswith("/"):
            path = parts.path if parts.scheme == "unix" else f"{host}/.s.PGSQL.{port}"
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(limits().launcher.ready_answer_s)
                probe.connect(path)
        else:
            socket.create_connection((host or "127.0.0.1", port), timeout=5.0).close()
    except OSError as error:
        return f"nothing answers at {host or parts.path or '127.0.0.1'} port {port} ({error.strerror or error})"
    return ""
