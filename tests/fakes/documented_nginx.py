"""The nginx of docs/operate.md with its own words, in front of servers of the tests."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # options of a library

import httpx
import pytest

from tests.fakes.control_process import ROOT, ServerProcess, free_port, wait_for_port

GATEWAY_HOST, CONTROL_HOST = "gateway.example.com", "muster.example.com"


@dataclass(frozen=True)
class DocumentedNginx:
    """A running proxy: one port, told apart by names."""

    port: int

    def client(self, host: str, *, local: str = "127.0.0.1", **headers: str) -> httpx.AsyncClient:
        """Return a client that speaks TLS to ``host`` from a loopback address of its own."""
        transport = httpx.AsyncHTTPTransport(verify=False, local_address=local)
        head = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return httpx.AsyncClient(transport=transport, base_url=f"https://127.0.0.1:{self.port}", headers=head, timeout=60)

    @property
    def socket_options(self) -> dict[str, Any]:
        """How to dial ``wss://gateway.example.com`` through it."""
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        return {"ssl": trusting, "host": "127.0.0.1", "port": self.port}


def read_example(folder: Path, *, port: int, gateway_port: int, control_port: int) -> str:
    """Return the page's configuration with the ports and the certificate of a test, and visitors from this machine."""
    page = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
    example = page.split("```nginx\n")[1].split("```")[0]
    changes = {
        r"/etc/ssl/\w+\.pem": f"{folder}/cert.pem",
        r"/etc/ssl/\w+\.key": f"{folder}/key.pem",
        r"listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        r"127\.0\.0\.1:8080": f"127.0.0.1:{gateway_port}",
        r"127\.0\.0\.1:8000": f"127.0.0.1:{control_port}",
        r"allow 10\.0\.0\.0/8": "allow 127.0.0.0/8",
    }
    for old, new in changes.items():
        example, count = re.subn(old, new, example)
        assert count, f"the example has no {old}"
    return example


@contextmanager
def run_documented_nginx(folder: Path, *, gateway_port: int, control_port: int) -> Iterator[DocumentedNginx]:
    """Run nginx until the block ends. Skips where it or openssl is not installed."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    openssl = shutil.which("openssl")
    if nginx is None or openssl is None:
        pytest.skip("nginx or openssl is not installed")
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    subprocess.run(
        [*make, "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")], check=True, capture_output=True
    )
    port = free_port()
    example = read_example(folder, port=port, gateway_port=gateway_port, control_port=control_port)
    paths = "".join(f"{name}_temp_path {folder / name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    config, log = folder / "nginx.conf", folder / "nginx.log"
    start = f"daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr; events {{}}"
    config.write_text(f"{start} http {{ access_log off; {paths}\n{example} }}")
    with log.open("wb") as output:
        process = subprocess.Popen([nginx, "-e", "stderr", "-c", str(config)], stdout=output, stderr=output)
    try:
        wait_for_port(ServerProcess(process, port, log))
        yield DocumentedNginx(port)
    finally:
        process.terminate()
        process.wait(30)
