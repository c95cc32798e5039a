"""TLS of a node's own port: whose certificate it shows, when the next one is due, and what a new one does not cut off."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from runner.api.server import serve_api
from runner.config import ApiConfig, TlsConfig, read_config
from runner.errors import ConfigError
from runner.tls import ServerTls
from tests.fakes.limits import set_runner_limits
from tests.fakes.runners.parts import assembled
from tests.fakes.tls import Authority, PrivateKey, list_changed, make_key
from wire import clock
from wire.bridge import NodeCertificate

HOST = "gpu1.lan"
KEY = "the key of this node's owner"


async def test_whatever_a_gateway_names_as_its_ca_ends_no_session(tmp_path: Path) -> None:
    authority = Authority()
    tls = open_tls(tmp_path)
    tls.hear_authorities(authority.certificate)
    await tls.take(NodeCertificate(certificate=authority.certify(read_csr(tls), host=HOST)))
    held = []
    for strange in list_changed(authority.certificate):
        tls.hear_authorities(strange)
        held.append(tls.is_held)
    assert set(held) == {True, False}, "those of another key or name have certified nothing"


class Hours:
    """The server's clock, as hours from now."""

    ahead = 0.0

    def now(self) -> float:
        return clock.unix_s() + self.ahead * 3600


def open_tls(folder: Path, now: Callable[[], float] = clock.unix_s) -> ServerTls:
    made = ServerTls(TlsConfig(folder=folder, host=HOST), now=now)
    made.open()
    return made


def read_csr(tls: ServerTls) -> x509.CertificateSigningRequest:
    asked = tls.ask()
    assert asked is not None
    return x509.load_pem_x509_csr(asked.csr.encode())


async def test_the_key_is_the_nodes_own_and_a_restart_keeps_what_was_certified(tmp_path: Path) -> None:
    authority = Authority()
    tls = open_tls(tmp_path)
    assert (tls.is_held, tls.ask()) == (False, None), "no gateway has said that there is a CA"
    tls.hear_authorities(authority.certificate)
    request = read_csr(tls)
    assert tls.ask() is None, "one request at a time"
    assert not await tls.take(NodeCertificate(error="no"))
    for foreign in (authority.certify(make_key(), host=HOST), authority.certify(request, host="gpu2.lan"), "no certificate"):
        assert not await tls.take(NodeCertificate(certificate=foreign))
        assert not tls.is_held
    assert await tls.take(NodeCertificate(certificate=authority.certify(request, host=HOST)))
    assert (tls.is_held, tls.ask()) == (True, None)
    assert {entry.name: entry.stat().st_mode & 0o777 for entry in os.scandir(tmp_path)} == {"tls.key": 0o600, "tls.pem": 0o600}
    again = open_tls(tmp_path)
    again.hear_authorities(authority.certificate)
    assert (again.is_held, again.ask()) == (True, None)
    again.hear_authorities(Authority().certificate)
    assert not again.is_held, "the CA was replaced"
    assert read_csr(again).public_key() == request.public_key()
    (tmp_path / "tls.key").write_text("no key")
    with pytest.raises(ConfigError, match="remove them"):
        open_tls(tmp_path)


@pytest.mark.parametrize(
    ("ahead_h", "is_held", "is_due"), [(0, True, False), (19 * 24, True, False), (21 * 24, True, True), (31 * 24, False, True)]
)
async def test_a_certificate_is_renewed_in_its_last_third_by_the_servers_clock(
    tmp_path: Path, ahead_h: float, is_held: bool, is_due: bool
) -> None:
    set_runner_limits(tls={"retry_s": 0.0})
    authority, hours = Authority(), Hours()
    tls = open_tls(tmp_path, hours.now)
    tls.hear_authorities(authority.certificate)
    await tls.take(NodeCertificate(certificate=authority.certify(read_csr(tls), host=HOST)))
    hours.ahead = ahead_h
    asked = tls.ask()
    assert (tls.is_held, asked is not None) == (is_held, is_due)
    assert asked is None or asked.is_held is is_held


async def see_certificate(port: int) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=HOST)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return x509.load_der_x509_certificate(shown).public_bytes(serialization.Encoding.PEM).decode(), reader, writer


async def test_files_of_the_owner_are_read_again_and_cut_no_connection_off(tmp_path: Path) -> None:
    authority, (first, second) = Authority(), (make_key(), make_key())
    certificate, key = tmp_path / "chain.pem", tmp_path / "own.key"

    def write(private: PrivateKey, shown: str, at_s: float) -> None:
        pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        key.write_bytes(private.private_bytes(*pem))
        certificate.write_text(shown)
        for path in (key, certificate):
            os.utime(path, (at_s, at_s))

    before, after = authority.certify(first, host=HOST), authority.certify(second, host=HOST)
    write(first, before, 1000)
    port = ("--standalone", "--api-port", "0", "--api-tls-cert", str(certificate), "--api-tls-key", str(key))
    async with assembled(tmp_path, *port) as parts:
        assert parts.tls is not None
        async with serve_api(parts, ApiConfig("127.0.0.1", 0, KEY, has_metrics=False, metrics_port=None)) as url:
            assert url.startswith("https://127.0.0.1:")
            number = int(url.rpartition(":")[2])
            shown, reader, writer = await see_certificate(number)
            assert shown == before
            write(second, before, 2000)
            await parts.tls.reload_files()
            shown, _, third = await see_certificate(number)
            assert shown == before, "a key of another certificate changes nothing"
            write(second, after, 3000)
            await parts.tls.reload_files()
            shown, _, other = await see_certificate(number)
            assert shown == after
            writer.write(b"GET /health HTTP/1.1\r\nhost: gpu1.lan\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 "), "what was open goes on"
            for one in (writer, third, other):
                one.transport.abort()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--api-tls-key", "x.key"), "needs --api-tls-cert"),
        (("--api-tls-cert", "x.pem", "--api-plain"), "no --api-plain"),
        (("--api-tls-cert", "/nowhere/x.pem"), "cannot be used"),
    ],
)
async def test_certificates_that_cannot_be_used_are_refused_at_the_start(
    tmp_path: Path, words: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        async with assembled(tmp_path, "--standalone", "--api-port", "0", *words):
            pass


def test_an_https_ticket_url_has_the_port_certified_unless_its_owner_says_how() -> None:
    words = ["--gateway", "http://g", "--token", "t", "--api-port", "1", "--data", "/d", "--ticket-url", "https://GPU1.lan/v1"]
    assert read_config(words, {}).tls == TlsConfig(folder=Path("/d"), host=HOST)
    assert read_config([*words, "--api-tls-cert", "c"], {}).tls == TlsConfig(certificate=Path("c"))
    assert read_config([*words, "--api-plain"], {}).tls is None
    assert read_config(words, {"MUSTER_API_PLAIN": "true"}).tls is None
    assert read_config([*words[:-1], "http://gpu1.lan"], {}).tls is None
