"""The internal CA: what it certifies, what it refuses, and what its certificates and its key are good for."""

from __future__ import annotations

import ssl
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any  # settings of Django

import pytest
from asgiref.sync import sync_to_async
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from django.utils import timezone

from nodes.addresses import make_trust
from nodes.errors import CertificateRefused, Conflict
from nodes.links import EndKind, LinkRegistry
from nodes.links.http import HttpLink, HttpTarget
from nodes.links.keeper import LinkKeeper
from nodes.links.port import LinkEnd
from nodes.models import Node, NodeAuthority
from nodes.services.certificates import (
    create_authority,
    describe_authorities,
    drop_authorities,
    find_authorities,
    issue_certificate,
    join_authorities,
    load_authorities,
    read_authorities,
    read_request,
    rotate_authority,
    sign_request,
)
from nodes.services.nodes import probe_node
from tests.fakes.links import RequestSink, make_row, open_request
from tests.fakes.nodes import ACTOR, audited, make_node
from tests.fakes.tls import list_changed, make_key, make_request, make_server, shake_hands
from wire.credentials import derive_cipher

pytestmark = pytest.mark.django_db

HOSTS = ["gpu1.lan", ".gpus.lan", "10.0.0.0/8"]


@pytest.fixture(autouse=True)
def _hosts(settings: Any) -> None:
    settings.NODE_DIRECT_HOSTS = HOSTS


def issue(url: str, csr: str) -> str:
    node = make_node(ticket_url=url)
    return issue_certificate(node_id=node.pk, url=url, csr=csr)


@pytest.mark.parametrize(
    ("url", "host", "others"),
    [
        ("https://gpu1.lan:8090", "gpu1.lan", ["gpu2.lan", "sub.gpu1.lan", "10.0.0.5"]),
        ("https://a.gpus.lan", "a.gpus.lan", ["b.gpus.lan", "gpus.lan"]),
        ("https://10.0.0.5:8090", "10.0.0.5", ["10.0.0.6", "gpu1.lan"]),
    ],
)
def test_a_certificate_holds_for_the_host_of_its_node_and_for_no_other(
    tmp_path: Path, url: str, host: str, others: list[str]
) -> None:
    create_authority(actor=ACTOR)
    key = make_key()
    certificate = issue(url, make_request(key))
    server, client = make_server(tmp_path, key, certificate), make_trust(read_authorities())
    assert x509.load_der_x509_certificate(shake_hands(server, client, host)).public_key() == key.public_key()
    for other in others:
        with pytest.raises(ssl.SSLCertVerificationError, match="match"):
            shake_hands(server, client, other)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, ssl.create_default_context(), host)
    (event,) = audited("node_ca.issue")
    assert event.detail["hosts"] == [host]


def test_what_a_request_asks_for_beyond_its_key_is_not_given(tmp_path: Path) -> None:
    create_authority(actor=ACTOR)
    key = make_key()
    wishes = (x509.BasicConstraints(ca=True, path_length=None), x509.SubjectAlternativeName([x509.DNSName("gpu2.gpus.lan")]))
    made = x509.load_pem_x509_certificate(issue("https://gpu1.lan", make_request(key, *wishes)).encode())
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert list(made.extensions.get_extension_for_class(x509.SubjectAlternativeName).value) == [x509.DNSName("gpu1.lan")]
    now = datetime.now(UTC)
    assert (made.not_valid_before_utc < now - timedelta(minutes=59), made.not_valid_after_utc < now + timedelta(days=30)) == (
        True,
        True,
    )


CSR = make_request(make_key())


@pytest.mark.parametrize(
    ("hosts", "csr", "reason"),
    [
        (["gpu2.lan"], CSR, "does not list gpu2.lan"),
        (["gpus.lan"], CSR, "does not list"),
        (["intranet.corp"], CSR, "for names that stand there"),
        (["192.168.1.1"], CSR, "does not list"),
        (["127.0.0.1"], CSR, "does not list"),
        (["muster.gpus.lan"], CSR, "host of this installation itself"),
        (["gpu1.lan", "gpu2.lan"], CSR, "does not list gpu2.lan"),
        (["gpu1.lan"], CSR[:200], "cannot be read"),
        (["gpu1.lan"], "x" * 9000, "too long"),
        (["gpu1.lan"], make_request(rsa.generate_private_key(65537, 1024)), "has to be"),
        (["gpu1.lan"], make_request(ec.generate_private_key(ec.SECP256K1())), "has to be"),
    ],
)
def test_what_is_not_listed_and_what_cannot_be_trusted_gets_no_certificate(
    settings: Any, hosts: list[str], csr: str, reason: str
) -> None:
    settings.GATEWAY_PUBLIC_URL = "https://muster.gpus.lan"
    create_authority(actor=ACTOR)
    with pytest.raises(CertificateRefused, match=reason):
        sign_request(csr=csr, hosts=hosts, actor=ACTOR)
    assert audited("node_ca.issue") == []


def test_a_request_of_which_one_bit_was_changed_is_refused() -> None:
    key, taken = make_key(), []
    for forged in list_changed(make_request(key)):
        with suppress(CertificateRefused):
            taken.append(read_request(forged))
    # How many bits the last byte of a signature leaves unused is no part of it.
    assert taken in ([], [key.public_key()])


def test_a_node_that_names_another_url_by_now_gets_nothing_for_the_first() -> None:
    create_authority(actor=ACTOR)
    node = make_node(ticket_url="https://gpu1.lan")
    Node.objects.filter(pk=node.pk).update(ticket_url="https://a.gpus.lan")
    with pytest.raises(CertificateRefused, match="another URL"):
        issue_certificate(node_id=node.pk, url="https://gpu1.lan", csr=CSR)


def test_whoever_has_the_stolen_key_of_the_ca_poses_as_no_host_that_is_not_listed(tmp_path: Path, settings: Any) -> None:
    create_authority(actor=ACTOR)
    row = NodeAuthority.objects.get()
    assert "PRIVATE" not in row.sealed_private
    stolen = serialization.load_der_private_key(
        derive_cipher(settings.SECRET_KEY, purpose="muster node ca").decrypt(row.sealed_private.encode()), None
    )
    assert isinstance(stolen, ec.EllipticCurvePrivateKey)
    authority, key, now = x509.load_pem_x509_certificate(row.certificate.encode()), make_key(), datetime.now(UTC)
    names = {"api.openai.com": x509.DNSName("api.openai.com"), "gpu1.lan": x509.DNSName("gpu1.lan")}

    def connect(host: str) -> None:
        made = (
            x509.CertificateBuilder().subject_name(x509.Name([])).issuer_name(authority.subject).public_key(key.public_key())
            .serial_number(1).not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.SubjectAlternativeName([names[host]]), critical=True).sign(stolen, hashes.SHA256())
        )  # fmt: skip
        server = make_server(tmp_path, key, made.public_bytes(serialization.Encoding.PEM).decode())
        shake_hands(server, make_trust(read_authorities()), host)

    connect("gpu1.lan")
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree violation"):
        connect("api.openai.com")


@pytest.mark.parametrize(("hosts", "foreign"), [(["gpu1.lan"], "10.0.0.5"), (["10.0.0.0/8"], "gpu1.lan")])
def test_of_a_kind_of_host_that_is_not_listed_nothing_is_permitted(settings: Any, hosts: list[str], foreign: str) -> None:
    settings.NODE_DIRECT_HOSTS = hosts
    create_authority(actor=ACTOR)
    settings.NODE_DIRECT_HOSTS = [*hosts, foreign]
    with pytest.raises(CertificateRefused, match="rotate"):
        sign_request(csr=CSR, hosts=[foreign], actor=ACTOR)
    constraints = x509.load_pem_x509_certificate(read_authorities().encode()).extensions
    assert constraints.get_extension_for_class(x509.NameConstraints).value.excluded_subtrees
    rotate_authority(is_at_once=True, actor=ACTOR)
    assert sign_request(csr=CSR, hosts=[foreign], actor=ACTOR)


def test_there_is_one_ca_for_listed_hosts_made_by_an_operator(settings: Any) -> None:
    with pytest.raises(CertificateRefused, match="ca create"):
        sign_request(csr=CSR, hosts=["gpu1.lan"], actor=ACTOR)
    with pytest.raises(Conflict, match="ca create"):
        rotate_authority(is_at_once=True, actor=ACTOR)
    settings.NODE_DIRECT_HOSTS = []
    with pytest.raises(CertificateRefused, match="lists no host"):
        create_authority(actor=ACTOR)
    settings.NODE_DIRECT_HOSTS = HOSTS
    said = create_authority(actor=ACTOR)
    assert "gives certificates" in said[0]
    assert "gpu1.lan, gpus.lan, 10.0.0.0/8" in said[2]
    with pytest.raises(Conflict, match="rotate"):
        create_authority(actor=ACTOR)
    settings.SECRET_KEY = "another secret of this installation"
    assert "cannot be decrypted" in describe_authorities()[0]
    with pytest.raises(CertificateRefused, match="rotate --now"):
        sign_request(csr=CSR, hosts=["gpu1.lan"], actor=ACTOR)
    assert (find_authorities(["http://10.0.0.1"]), bool(find_authorities(["http://a", "HTTPS://b"]))) == ("", True)


def test_the_next_ca_is_published_a_week_before_it_certifies_and_the_last_one_until_its_certificates_have_expired() -> None:
    create_authority(actor=ACTOR)
    (first,) = NodeAuthority.objects.all()
    rotate_authority(is_at_once=False, actor=ACTOR)
    second = NodeAuthority.objects.exclude(pk=first.pk).get()
    both = second.certificate + first.certificate
    assert read_authorities() == join_authorities(load_authorities()) == both
    assert issuer_of(sign_request(csr=CSR, hosts=["gpu1.lan"], actor=ACTOR)) == issuer_of(first.certificate)
    drop_authorities()
    week = timezone.now() - timedelta(seconds=1)
    NodeAuthority.objects.filter(pk=second.pk).update(issues_at=week)
    assert issuer_of(sign_request(csr=CSR, hosts=["gpu1.lan"], actor=ACTOR)) == issuer_of(second.certificate)
    drop_authorities()
    first.refresh_from_db()
    assert (first.sealed_private, read_authorities()) == ("", both), "its key is gone, what it gave still holds"
    assert first.dropped_at is not None
    assert first.dropped_at - second.issues_at >= timedelta(days=30)
    NodeAuthority.objects.filter(pk=first.pk).update(dropped_at=timezone.now())
    assert join_authorities(load_authorities()) == second.certificate
    drop_authorities()
    rotate_authority(is_at_once=True, actor=ACTOR)
    assert NodeAuthority.objects.count() == 2
    assert second.certificate not in read_authorities(), "a stolen key is good for nothing at once"
    assert [event.action for event in audited("node_ca.rotate")] == ["node_ca.rotate"] * 2


def issuer_of(certificate: str) -> str:
    return x509.load_pem_x509_certificate(certificate.encode()).issuer.rfc4514_string()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def called(tmp_path: Path, settings: Any) -> Iterator[Node]:
    """A node that is called at its URL over TLS, with a certificate of the internal CA."""
    settings.NODE_DIRECT_ALLOW_LOOPBACK = True
    create_authority(actor=ACTOR)
    key = make_key()
    context = make_server(tmp_path, key, sign_request(csr=make_request(key), hosts=["127.0.0.1"], actor=ACTOR))
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, args=[0.005], daemon=True).start()
        yield make_node(public_base_url=f"https://127.0.0.1:{server.server_address[1]}")
        server.shutdown()


def test_calls_of_a_node_trust_the_internal_ca_and_those_of_the_machine(called: Node) -> None:
    assert probe_node(called, authorities=find_authorities([called.public_base_url])).error == ""
    assert "CERTIFICATE_VERIFY_FAILED" in probe_node(called, authorities="").error


@pytest.mark.django_db(transaction=True)
async def test_a_gateway_trusts_the_ca_that_holds_from_the_next_connection_on(called: Node) -> None:
    port = int(called.public_base_url.rpartition(":")[2])
    target = HttpTarget(scheme="https", host="127.0.0.1", address="127.0.0.1", port=port)
    row = make_row(called.pk, is_direct=True, public_base_url=called.public_base_url, connected=False)
    keeper = LinkKeeper(LinkRegistry(), gateway_id=uuid.uuid4(), connect_s=5.0)
    keeper.apply([row], targets={called.pk: target}, peers={})
    link = keeper.registry.get(called.pk)
    assert isinstance(link, HttpLink)

    async def ask() -> LinkEnd:
        sink = RequestSink()
        link.open_stream(open_request(is_streaming=False), sink)
        return await sink.ended()

    refused = await ask()
    assert (refused.kind, "certificate verify failed" in refused.message.lower()) == (EndKind.ENGINE_FAILED, True), refused
    keeper.trust(await sync_to_async(read_authorities)())
    assert (await ask()).kind is EndKind.COMPLETE
    link.close("over")
