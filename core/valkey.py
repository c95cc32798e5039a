"""Where Valkey is: one server by its URL, or the master that Sentinels name."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

# redis-py imports OpenTelemetry's metrics wherever they are installed, which costs each process 0.14 s and 3 MB, and nothing
# here turns them on. By an entry without a module Python knows that there is none.
_METRICS = "opentelemetry"
sys.modules.setdefault(_METRICS, None)  # type: ignore[arg-type]
import redis  # noqa: E402
import redis.asyncio  # noqa: E402
import redis.asyncio.sentinel  # noqa: E402
import redis.sentinel  # noqa: E402
from redis.asyncio.connection import parse_url  # noqa: E402

if sys.modules[_METRICS] is None:
    del sys.modules[_METRICS]

DEFAULT_URL = "redis://127.0.0.1:6379/0"
GRAMMAR = (
    "redis://HOST:PORT/DB, rediss://…, unix:///path/valkey.sock?db=0, or "
    "sentinel://USER:PASSWORD@HOST:26379,HOST:26379/MASTER?db=0"
)
_SENTINEL_PORT = 26379


@dataclass(frozen=True, slots=True)
class ValkeyAddress:
    """``sentinels``: host and port of each, empty = ``url`` names the server itself. ``login``: as it stands in the URL."""

    url: str
    db: int
    sentinels: tuple[tuple[str, int], ...] = ()
    master: str = ""
    login: str = ""

    @property
    def credentials(self) -> dict[str, Any]:  # Any: options of redis-py
        """The server's user and password; Sentinels are asked without."""
        user, _, password = self.login.partition(":")
        named = {"username": unquote(user), "password": unquote(password)}
        return {name: value for name, value in named.items() if value}

    @property
    def host(self) -> str | dict[str, object]:
        """The server, as channels_redis takes it."""
        if not self.sentinels:
            return self.url
        return {"sentinels": list(self.sentinels), "master_name": self.master, "db": self.db, **self.credentials}

    @property
    def broker_url(self) -> str:
        """The server, as Celery takes it: of a socket it wants another scheme, and calls the number "virtual_host"."""
        if not self.sentinels:
            return self.url.replace("unix://", "redis+socket://").replace("?db=", "?virtual_host=")
        login = f"{self.login}@" if self.login else ""
        return ";".join(f"sentinel://{login}{_write_host(host)}:{port}/{self.db}" for host, port in self.sentinels)


def look_at_valkey(url: str, queue: str, *, longest_s: float) -> tuple[dict[str, Any], int] | None:  # Any: as redis-py has it
    """Return what Valkey says of itself and how many tasks wait in a queue of Celery's; None when it does not answer."""
    try:
        with open_client(url, socket_timeout=longest_s, socket_connect_timeout=longest_s) as client:
            info: Any = client.info()
            queued: Any = client.llen(queue)
    except redis.RedisError:
        return None
    return dict(info), int(queued)


def read_address(url: str) -> ValkeyAddress:
    """Return what a URL names. Raises ValueError that says what would do."""
    parts = urlsplit(url)
    if parts.scheme in {"redis", "rediss", "unix"}:
        return ValkeyAddress(url, int(parse_url(url).get("db", 0)))
    if parts.scheme != "sentinel":
        extra = "; of a cluster name Sentinels, Celery's queues need one server" if "cluster" in parts.scheme else ""
        raise ValueError(f"must be {GRAMMAR}, not {parts.scheme or 'without a scheme'}://{extra}")
    login, _, hosts = parts.netloc.rpartition("@")
    master, number = unquote(parts.path.strip("/")), parse_qs(parts.query).get("db", ["0"])[-1]
    if not master or "/" in master or not number.isdecimal():
        raise ValueError(f"must name the master after the Sentinels, and a database by its number: {GRAMMAR}")
    try:
        # One at a time, so that brackets of IPv6 and ports are read as in any URL.
        found = [urlsplit(f"//{host}") for host in hosts.split(",")]
        sentinels = tuple((one.hostname or "", one.port or _SENTINEL_PORT) for one in found)
    except ValueError as error:
        raise ValueError(f"has a Sentinel that cannot be read ({error}): {GRAMMAR}") from None
    if not all(host for host, _ in sentinels):
        raise ValueError(f"names a Sentinel without a host: {GRAMMAR}")
    return ValkeyAddress(url, int(number), sentinels, master, login)


def open_client(url: str, **options: Any) -> redis.Redis:  # Any: options of redis-py
    """Return a client of the server, which a failover leads to the new master. Connects when it is first used."""
    address = read_address(url)
    if not address.sentinels:
        return redis.Redis.from_url(url, **options)
    sentinel = redis.sentinel.Sentinel(list(address.sentinels), **options)  # type: ignore[no-untyped-call]  # redis-py
    client: redis.Redis = sentinel.master_for(address.master, redis.Redis, db=address.db, **address.credentials)  # type: ignore[no-untyped-call]
    return client


def open_async_client(url: str, **options: Any) -> redis.asyncio.Redis:  # Any: options of redis-py
    """Do as ``open_client`` does, for an event loop."""
    address = read_address(url)
    if not address.sentinels:
        return redis.asyncio.Redis.from_url(url, **options)
    sentinel = redis.asyncio.sentinel.Sentinel(list(address.sentinels), **options)  # type: ignore[no-untyped-call]  # redis-py
    client: redis.asyncio.Redis = sentinel.master_for(address.master, redis.asyncio.Redis, db=address.db, **address.credentials)
    return client


def _write_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
