"""Posting a notice to a webhook: which addresses may be called, how a body is signed, one attempt.

Who is told what, and when it is tried again, is for ``governance.notices``.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as LookupTimeout
from dataclasses import dataclass
from urllib.parse import urlsplit

from core.limits import limits
from governance.errors import GovernanceError

SIGNATURE_HEADER = "X-Muster-Signature"
_PORTS = {"http": 80, "https": 443}
_METADATA = {ipaddress.ip_address(text) for text in ("100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fd20:ce::254")}
"""Where clouds answer with credentials, beside the link-local addresses."""
_NAT64, _LOCAL_NAT64 = ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48")
"""RFC 6052 and RFC 8215. Where in the second one the IPv4 address stands, only its network knows: it is never called."""
_LOOKUPS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="webhook-lookup")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class InvalidWebhook(GovernanceError):
    """The name or the address of a webhook cannot be used; ``param`` says which."""


class DeliveryFailed(Exception):
    """A notice did not get through. The text says why, without the address, which may itself be a secret."""


@dataclass(frozen=True, slots=True)
class Target:
    """An address taken apart. ``path`` includes the query."""

    scheme: str
    host: str
    port: int
    path: str


def parse_webhook_url(url: str) -> Target:
    """Take an address apart. Raises InvalidWebhook: plain http only goes to loopback and private addresses."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        raise _refusal("has no host and port that can be read") from None
    if (
        len(url) > limits().governance.webhook_url_chars
        or not url.isascii()
        or not url.strip().isprintable()
        or " " in url.strip()
    ):
        raise _refusal(f"must be at most {limits().governance.webhook_url_chars} ASCII characters without blanks")
    if parts.scheme not in _PORTS or not parts.hostname:
        raise _refusal("must start with https://, or with http:// for an address on this machine or a private network")
    if parts.username is not None or parts.fragment:
        raise _refusal("must carry no user name, password or fragment")
    target = Target(parts.scheme, parts.hostname, port, (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
    literal = _read_literal(target.host)
    if literal is not None:
        try:
            _check_address(literal, target.scheme)
        except DeliveryFailed as refusal:
            raise _refusal(str(refusal)) from None
    return target


def sign_body(secret: str, body: bytes, *, at: int) -> str:
    """Return the signature header: ``t=<Unix seconds>,v1=<HMAC-SHA256 of "t.body" in hex>``."""
    mac = hmac.new(secret.encode(), f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={mac}"


def post_notice(*, url: str, secret: str, body: bytes, at: int) -> None:
    """Post ``body`` once; each phase blocks for about ``webhook_s`` at most. Raises DeliveryFailed unless answered with 2xx.

    The host is resolved once, and the address that was checked is the one dialled. Redirects are not followed.
    """
    import httpx  # 6 MB that most processes need for nothing

    try:
        target = parse_webhook_url(url)
    except InvalidWebhook as refusal:
        raise DeliveryFailed(refusal.message) from None
    address = _resolve(target)
    path, _, query = target.path.partition("?")
    dialled = httpx.URL(scheme=target.scheme, host=address, port=target.port, path=path, query=query.encode() or None)
    host = f"[{target.host}]" if ":" in target.host else target.host
    headers = {
        "host": host if target.port == _PORTS[target.scheme] else f"{host}:{target.port}",
        "content-type": "application/json",
        "user-agent": "muster",
        SIGNATURE_HEADER: sign_body(secret, body, at=at),
    }
    try:
        with httpx.Client(timeout=limits().governance.webhook_s, follow_redirects=False, trust_env=False) as client:
            extensions = {"sni_hostname": target.host}
            request = client.build_request("POST", dialled, content=body, headers=headers, extensions=extensions)
            answer = client.send(request, stream=True)  # what it says beside the status is nobody's business
            answer.close()
    except httpx.TimeoutException:
        raise DeliveryFailed(f"no answer within {limits().governance.webhook_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeliveryFailed(f"cannot be reached ({type(error).__name__})") from None
    if not answer.is_success:
        raise DeliveryFailed(f"answered with {answer.status_code}")


def _resolve(target: Target) -> str:
    """Return the address to dial. One refused address among several refuses the host."""
    literal = _read_literal(target.host)
    if literal is not None:
        return str(literal)
    # The resolver of the C library has no time-out that we control, so it runs where we can stop waiting.
    lookup = _LOOKUPS.submit(socket.getaddrinfo, target.host, target.port, type=socket.SOCK_STREAM)
    try:
        found = lookup.result(timeout=limits().governance.webhook_lookup_s)
    except LookupTimeout:
        lookup.cancel()
        raise DeliveryFailed(f"the name server did not answer within {limits().governance.webhook_lookup_s:g} s") from None
    except (OSError, UnicodeError):
        raise DeliveryFailed("the host name cannot be resolved") from None
    addresses = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
    for text in addresses:
        _check_address(ipaddress.ip_address(text), target.scheme)
    if not addresses:
        raise DeliveryFailed("the host name has no address")
    return addresses[0]


def _check_address(address: Address, scheme: str) -> None:
    behind = _read_embedded(address)
    is_reserved = address.is_reserved and not address.is_loopback and address not in _NAT64
    is_odd = address.is_multicast or address.is_unspecified or is_reserved
    is_inner = address in _LOCAL_NAT64 or not all(four.is_global and not four.is_multicast for four in behind)
    is_mapped = isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None
    if address.is_link_local or is_odd or is_inner or is_mapped or address in _METADATA:
        raise DeliveryFailed("leads to a link-local, metadata or special address, which is never called")
    if scheme == "http" and (behind or not (address.is_loopback or address.is_private)):
        raise DeliveryFailed("leads to a public address by plain http; use https://")


def _read_embedded(address: Address) -> list[ipaddress.IPv4Address]:
    """Return the IPv4 addresses that a gateway on the way to an IPv6 address would call: of NAT64, 6to4 or Teredo."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    if address in _NAT64:
        return [ipaddress.IPv4Address(address.packed[-4:])]
    return [four for four in (address.sixtofour, *(address.teredo or ())) if four is not None]


def _read_literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _refusal(what: str) -> InvalidWebhook:
    return InvalidWebhook(f"The address {what}.", param="url")
