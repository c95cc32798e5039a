"""Which URLs of nodes the gateway may call (``public_base_url``), and at which address. The guard against SSRF.

A name is resolved once, every address it has is checked, and the caller connects to the address given back, so a name
server that changes its mind later moves nothing. Private networks are where nodes live: an operator lists hosts and
networks (``NODE_DIRECT_HOSTS``) instead of us guessing. Some addresses stay refused whatever is listed.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LookupTimeout
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.conf import settings

from core.limits import limits
from nodes.errors import AddressRefused, AddressUnresolvable

if TYPE_CHECKING:
    import httpx

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolver = Callable[[str, int], Sequence[str]]

PARAM = "public_base_url"
_DEFAULT_PORTS = {"http": 80, "https": 443}
# Split by hand: urllib forgives what HTTP clients then read in another way.
_URL_RE = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<rest>.*)\Z", re.DOTALL)
_AUTHORITY_RE = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?\Z")
_PATH_RE = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]*)*\Z")
_LABEL_RE = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z")
_NUMBER_RE = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)\Z")
_FORBIDDEN: tuple[tuple[Network, str], ...] = tuple(
    (ipaddress.ip_network(network), why)
    for network, why in (
        ("0.0.0.0/8", "an unspecified address"),
        ("169.254.0.0/16", "a link-local or metadata address"),
        ("100.100.100.200/32", "a cloud metadata address"),
        ("168.63.129.16/32", "a cloud metadata address"),
        ("192.0.0.0/24", "a protocol assignment or cloud metadata address"),
        ("192.88.99.0/24", "a 6to4 relay address"),
        ("224.0.0.0/4", "a multicast address"),
        ("240.0.0.0/4", "a reserved or broadcast address"),
        ("::/128", "an unspecified address"),
        ("::ffff:0:0/96", "an IPv4-mapped IPv6 address"),
        ("::/96", "an IPv4-compatible IPv6 address"),
        ("::ffff:0:0:0/96", "an IPv4-translated IPv6 address"),
        ("64:ff9b::/96", "a NAT64 address"),
        ("64:ff9b:1::/48", "a NAT64 address"),
        ("100::/64", "a discard address"),
        ("2001::/32", "a Teredo address"),
        ("2002::/16", "a 6to4 address"),
        ("fd00:ec2::254/128", "a cloud metadata address"),
        ("fd20:ce::254/128", "a cloud metadata address"),
        ("fe80::/10", "a link-local address"),
        ("fec0::/10", "a site-local address"),
        ("ff00::/8", "a multicast address"),
    )
)
# Not ``is_loopback``: some Python versions say yes for an IPv4-mapped address, which must stay refused.
LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))
_LOOKUPS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="direct-lookup")


@dataclass(frozen=True, slots=True)
class DirectUrl:
    """A URL taken apart. ``host`` is lower case, without brackets; ``base_path`` is empty or starts with ``/``."""

    scheme: str
    host: str
    port: int
    base_path: str


@dataclass(frozen=True, slots=True)
class DirectTarget:
    """Where to connect: ``address`` and ``port``. ``host`` is for the Host header and TLS; ``base_path`` goes first."""

    scheme: str
    host: str
    address: str
    port: int
    base_path: str


def build_request(
    client: httpx.Client, target: DirectTarget, method: str, path: str, *, api_key: str = "", body: dict[str, Any] | None = None
) -> httpx.Request:
    """Return a request that dials the checked address and is for the host of the URL, in HTTP and in TLS alike.

    ``path`` goes below the URL's own; ``api_key``: of the node, as a bearer credential; ``body``: JSON members.
    """
    import httpx  # a gateway checks addresses without it, and is back sooner after a kill

    url = httpx.URL(scheme=target.scheme, host=target.address, port=target.port, path=f"{target.base_path}{path}")
    headers = {"host": f"{target.host}:{target.port}", "accept-encoding": "identity"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return client.build_request(method, url, headers=headers, json=body, extensions={"sni_hostname": target.host})


@lru_cache(maxsize=4)
def make_trust(authorities: str) -> ssl.SSLContext:
    """Return what calls of nodes are verified with: the CAs of this machine, and these (PEM, empty = none)."""
    context = ssl.create_default_context()
    if authorities:
        context.load_verify_locations(cadata=authorities)
    return context


@dataclass(frozen=True, slots=True)
class HostRule:
    """One entry of the allow-list: a network or a host name (``.lan`` = every name below), on ``port`` or on any."""

    network: Network | None
    name: str
    port: int | None

    def names(self, url: DirectUrl) -> bool:
        """Return whether the entry allows the host by its name."""
        if self.network is not None or self.port not in (None, url.port):
            return False
        return url.host.endswith(self.name) if self.name.startswith(".") else url.host == self.name

    def covers(self, address: Address, port: int) -> bool:
        """Return whether the entry allows the address by its network."""
        return self.network is not None and self.port in (None, port) and address in self.network


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """What an operator allows. No rule and no loopback means that no node is called over HTTP."""

    rules: tuple[HostRule, ...]
    allow_loopback: bool


def parse_rule(text: str) -> HostRule:
    """Return one allow-list entry: ``10.0.0.0/8``, ``gpu1.lan``, ``.lan``, ``gpu1.lan:8000``, ``[fd00::5]:8000``.

    Raises ValueError, saying what would do.
    """
    if "/" in text:
        return HostRule(network=ipaddress.ip_network(text), name="", port=None)
    if text.count(":") > 1 and not text.startswith("["):
        return HostRule(network=ipaddress.ip_network(text), name="", port=None)
    match = _AUTHORITY_RE.match(text.lower())
    if match is None:
        raise ValueError(f"{text!r} is no host, host:port, address or network; write for example gpu1.lan or 10.0.0.0/24")
    port = int(match["port"]) if match["port"] else None
    if match["six"]:
        return HostRule(network=ipaddress.ip_network(match["six"]), name="", port=port)
    host = match["host"]
    if _NUMBER_RE.match(host.rsplit(".", 1)[-1]):
        return HostRule(network=ipaddress.ip_network(host), name="", port=port)
    if not all(_LABEL_RE.match(label) for label in host.removeprefix(".").split(".")):
        raise ValueError(f"{text!r} is no host name; write for example gpu1.lan or .lan")
    return HostRule(network=None, name=host, port=port)


PRIVATE = "private"
"""Entry of the allow-list for the networks that no router of the internet knows (RFC 1918, RFC 4193)."""
_PRIVATE = tuple(parse_rule(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"))


def parse_policy(hosts: Sequence[str], *, allow_loopback: bool) -> AddressPolicy:
    """Return the policy that ``NODE_DIRECT_HOSTS`` and ``NODE_DIRECT_ALLOW_LOOPBACK`` describe. Raises ValueError."""
    rules = [rule for text in hosts for rule in (_PRIVATE if text.lower() == PRIVATE else (parse_rule(text),))]
    return AddressPolicy(rules=tuple(rules), allow_loopback=allow_loopback)


def parse_direct_url(url: str) -> DirectUrl:
    """Take a URL apart, refusing every form that two programs could read differently. Raises AddressRefused."""
    if len(url) > limits().nodes.url_chars:
        raise _refusal(f"is longer than {limits().nodes.url_chars} characters")
    match = _URL_RE.match(url)
    if match is None or match["scheme"].lower() not in _DEFAULT_PORTS:
        raise _refusal("must start with http:// or https://")
    if "@" in match["authority"]:
        raise _refusal("must not carry a user name or password")
    authority = _AUTHORITY_RE.match(match["authority"])
    if authority is None:
        raise _refusal("has no plain host; write a name, an IPv4 address or an IPv6 address in brackets, and a port if needed")
    if not _PATH_RE.match(match["rest"]) or _has_dot_segment(match["rest"]):
        raise _refusal("must end in a plain path, without query, fragment, escapes or dot segments")
    scheme = match["scheme"].lower()
    port = int(authority["port"]) if authority["port"] else _DEFAULT_PORTS[scheme]
    if not 1 <= port <= 65535:
        raise _refusal("has a port outside 1 to 65535")
    host = _read_six(authority["six"]) if authority["six"] else _read_host(authority["host"])
    return DirectUrl(scheme=scheme, host=host, port=port, base_path=match["rest"].rstrip("/"))


def check_addresses(url: DirectUrl, addresses: Sequence[str], policy: AddressPolicy) -> str:
    """Return the address to connect to. One bad address among several refuses the host. Raises AddressRefused."""
    if not addresses:
        raise AddressUnresolvable(f"{PARAM}: {url.host} has no address.", param=PARAM)
    is_named = any(rule.names(url) for rule in policy.rules)
    for text in addresses:
        _check_address(url, ipaddress.ip_address(text), policy, is_named=is_named)
    return addresses[0]


def resolve_direct_target(url: str, *, policy: AddressPolicy | None = None, resolver: Resolver | None = None) -> DirectTarget:
    """Return where to connect for ``url`` under ``policy`` (None = the settings). Blocks for at most ``lookup_s``.

    Raises AddressRefused (fix the URL or the allow-list) and AddressUnresolvable (may pass).
    """
    allowed = policy or parse_policy(settings.NODE_DIRECT_HOSTS, allow_loopback=settings.NODE_DIRECT_ALLOW_LOOPBACK)
    parts = parse_direct_url(url)
    if not allowed.rules and not allowed.allow_loopback:
        raise _refusal(
            "cannot be used: MUSTER_DIRECT_HOSTS is empty, so no host is allowed. An operator lists hosts or networks there "
            "(private = all private networks) and restarts control plane, worker and gateways; or leave the URL out and let "
            "the node dial in"
        )
    literal = _read_literal(parts.host)
    addresses = [str(literal)] if literal is not None else _look_up(parts, resolver or _resolve_with_system)
    address = check_addresses(parts, addresses, allowed)
    return DirectTarget(scheme=parts.scheme, host=parts.host, address=address, port=parts.port, base_path=parts.base_path)


def _check_address(url: DirectUrl, address: Address, policy: AddressPolicy, *, is_named: bool) -> None:
    if any(address in network for network in LOOPBACK):
        if policy.allow_loopback:
            return
        raise _refusal("leads to a loopback address; set MUSTER_DIRECT_ALLOW_LOOPBACK only if the node runs on this machine")
    for network, why in _FORBIDDEN:
        if address in network:
            raise _refusal(f"leads to {why}, which is never called")
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id:
        raise _refusal("leads to an address with a zone, which is never called")
    if not is_named and not any(rule.covers(address, url.port) for rule in policy.rules):
        raise _refusal(
            f"names {url.host} port {url.port}, which is not in MUSTER_DIRECT_HOSTS; an operator adds it there (private = all "
            "private networks) and restarts control plane, worker and gateways"
        )


def _read_host(host: str) -> str:
    name = host.lower()
    last = name.rsplit(".", 1)[-1]
    if _NUMBER_RE.match(last):
        try:
            return str(ipaddress.IPv4Address(name))
        except ValueError:
            raise _refusal("has a numeric host that is no dotted IPv4 address; write all four decimal parts") from None
    if len(name) > 253 or not all(_LABEL_RE.match(label) for label in name.split(".")):
        raise _refusal("has a host that is no plain name")
    return name


def _read_six(text: str) -> str:
    try:
        return str(ipaddress.IPv6Address(text))
    except ValueError:
        raise _refusal("has a host in brackets that is no IPv6 address") from None


def _read_literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _has_dot_segment(path: str) -> bool:
    return any(segment in {".", ".."} for segment in path.split("/"))


def _look_up(url: DirectUrl, resolver: Resolver) -> Sequence[str]:
    # The resolver of the C library has no time-out of its own that we control, so it runs where we can stop waiting.
    lookup = _LOOKUPS.submit(resolver, url.host, url.port)
    try:
        return lookup.result(timeout=limits().nodes.lookup_s)
    except LookupTimeout:
        lookup.cancel()
        raise AddressUnresolvable(
            f"{PARAM}: the name server did not answer for {url.host} within {limits().nodes.lookup_s:.0f} s.", param=PARAM
        ) from None
    except (OSError, UnicodeError) as error:
        raise AddressUnresolvable(f"{PARAM}: {url.host} cannot be resolved ({type(error).__name__}).", param=PARAM) from None


def _resolve_with_system(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for _, _, _, _, sockaddr in found))


def _refusal(what: str) -> AddressRefused:
    return AddressRefused(f"{PARAM} {what}.", param=PARAM)
