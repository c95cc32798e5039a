"""nginx and Caddy as deploy/ sets them up, on ports and with a certificate of a test."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from controlplane.launcher.environment import ROOT
from controlplane.tls import Pair
from tests.fakes.control_process import ServerProcess, free_port, wait_for_port
from tests.fakes.tls import Authority

DEPLOY = ROOT / "deploy"
GATEWAY_HOST, CONTROL_HOST = "gateway.example.com", "muster.example.com"


@dataclass(frozen=True)
class Proxy:
    """A running proxy: one port with TLS and one without, its sites told apart by names."""

    name: str
    port: int
    plain_port: int

    def client(self, host: str, *, local: str = "127.0.0.1", **headers: str) -> httpx.AsyncClient:
        """Return a client that speaks TLS to ``host`` from a loopback address of its own."""
        transport = httpx.AsyncHTTPTransport(verify=False, local_address=local)
        head = {"host": host, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return httpx.AsyncClient(transport=transport, base_url=f"https://127.0.0.1:{self.port}", headers=head, timeout=60)

    @property
    def socket_options(self) -> dict[str, Any]:
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        return {"ssl": trusting, "host": "127.0.0.1", "port": self.port}


@dataclass(frozen=True)
class Wanted:
    """What a proxy is to stand in front of, and where."""

    folder: Path
    pair: Pair
    gateway_port: int
    control_port: int
    port: int
    plain_port: int


def set_up_nginx(program: str, wanted: Wanted) -> tuple[list[str], Mapping[str, str]]:
    folder = wanted.folder
    changes = {
        r"/etc/letsencrypt/live/muster/fullchain\.pem": str(wanted.pair.certificate),
        r"/etc/letsencrypt/live/muster/privkey\.pem": str(wanted.pair.key),
        r"listen 443 ssl": f"listen 127.0.0.1:{wanted.port} ssl", r"listen \[::\]:443 ssl;": "",
        r"listen 80;": f"listen 127.0.0.1:{wanted.plain_port};", r"listen \[::\]:80;": "",
        r"/var/www/certbot": str(folder), r"127\.0\.0\.1:8080": f"127.0.0.1:{wanted.gateway_port}",
        r"127\.0\.0\.1:8000": f"127.0.0.1:{wanted.control_port}", r"allow 10\.0\.0\.0/8": "allow 127.0.0.0/8",
    }  # fmt: skip
    text = "".join((DEPLOY / "nginx" / name).read_text() for name in ("muster-http.conf", "muster.conf"))
    for old, new in changes.items():
        text, count = re.subn(old, lambda _, new=new: new, text)  # type: ignore[misc]  # it has the type of new
        assert count, f"deploy/nginx has no {old}"
    paths = "".join(f"{name}_temp_path {folder / name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    start = f"daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr; events {{}}"
    (folder / "nginx.conf").write_text(f"{start} http {{ access_log off; {paths}\n{text} }}")
    return [program, "-e", "stderr", "-c", str(folder / "nginx.conf")], {}


def set_up_caddy(program: str, wanted: Wanted) -> tuple[list[str], Mapping[str, str]]:
    # Without HTTP/3: the UDP port of that number is taken, as a mark of ``free_port``.
    ports = f"http_port {wanted.plain_port}\nhttps_port {wanted.port}\nservers {{\nprotocols h1 h2\n}}"
    own = f"{{\nadmin off\n{ports}\ndefault_sni {GATEWAY_HOST}\n}}\n"
    (wanted.folder / "Caddyfile").write_text(own + (DEPLOY / "caddy" / "Caddyfile").read_text())
    variables = {
        "MUSTER_GATEWAY_NAME": GATEWAY_HOST, "MUSTER_CONTROL_NAME": CONTROL_HOST, "MUSTER_OPERATORS": "127.0.0.0/8",
        "MUSTER_GATEWAY_UPSTREAM": f"127.0.0.1:{wanted.gateway_port}",
        "MUSTER_CONTROL_UPSTREAM": f"127.0.0.1:{wanted.control_port}",
        "CADDY_TLS": f"tls {wanted.pair.certificate} {wanted.pair.key}",
        "XDG_DATA_HOME": str(wanted.folder), "XDG_CONFIG_HOME": str(wanted.folder),
    }  # fmt: skip
    return [program, "run", "--adapter", "caddyfile", "--config", str(wanted.folder / "Caddyfile")], variables


Start = Callable[[str, Wanted], tuple[list[str], Mapping[str, str]]]
PROXIES: dict[str, Start] = {
    "nginx": set_up_nginx,
    "caddy": set_up_caddy,
}


@contextmanager
def run_proxy(name: str, folder: Path, *, gateway_port: int, control_port: int) -> Iterator[Proxy]:
    """Run a proxy until the block ends. Skips where it is not installed."""
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if program is None:
        pytest.skip(f"{name} is not installed")
    pair = Authority().write_pair(folder, host=GATEWAY_HOST)
    wanted = Wanted(folder, pair, gateway_port, control_port, free_port(), free_port())
    command, variables = PROXIES[name](program, wanted)
    log = folder / "proxy.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **variables})
    try:
        for port in (wanted.port, wanted.plain_port):
            wait_for_port(ServerProcess(process, port, log))
        yield Proxy(name, wanted.port, wanted.plain_port)
    finally:
        process.terminate()
        process.wait(30)
