"""nginx as the peer: one worker, a key check, no buffering, kept-alive connections to the mock."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.processes import Child

_START_S = 10.0
KEY = "bench-peer-key"

_CONFIG = """\
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    tcp_nodelay on;
    keepalive_requests 1000000000;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    map $http_authorization $allowed {{ default 0; "Bearer {key}" 1; }}
    upstream mock {{ server 127.0.0.1:{upstream_port}; keepalive 512; keepalive_requests 1000000000; }}
    server {{
        listen 127.0.0.1:{port};
        client_max_body_size 64m;
        location / {{
            if ($allowed = 0) {{ return 401; }}
            proxy_pass http://mock;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_request_buffering off;
        }}
    }}
}}
"""


def find_nginx() -> Path:
    """Return the path of nginx. Raises BenchmarkError when it is not installed."""
    found = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise BenchmarkError("it is not installed, so there are no ratios to it (apt-get install nginx)")
    return Path(found)


def find_free_port() -> int:
    """Return a loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def is_listening(port: int) -> bool:
    """Return whether something accepts connections on a loopback port."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Nginx:
    """A running nginx in front of ``upstream_port``."""

    def __init__(self, binary: Path, *, upstream_port: int, work_dir: Path, cores: Sequence[int] = ()) -> None:
        self.port = find_free_port()
        folder = work_dir / "nginx"
        folder.mkdir()
        config = folder / "nginx.conf"
        config.write_text(_CONFIG.format(folder=folder, key=KEY, upstream_port=upstream_port, port=self.port))
        argv = [str(binary), "-p", str(folder), "-e", "stderr", "-c", str(config)]
        self.child = Child("nginx", argv, log_dir=work_dir, cores=cores)
        self.child.wait_until(lambda: is_listening(self.port), "nginx was to listen", _START_S)

    def stop(self) -> None:
        """End nginx and its worker."""
        self.child.stop()
