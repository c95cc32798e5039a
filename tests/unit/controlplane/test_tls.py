"""Certificate and key of a server are judged in words, and a renewed one is shown only if it is good."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from controlplane.env import SettingError, list_variables, read_path
from controlplane.tls import CertificateError, Pair, ServedCertificate, explain_time, list_hosts, load_pair, make_context
from core.limits import limits
from tests.fakes.clock import VirtualClock
from tests.fakes.tls import Authority, shake_hands
from wire import clock

AUTHORITY = Authority()
TRUST = AUTHORITY.make_trust()
PASSPHRASE = serialization.BestAvailableEncryption(b"secret")


def write_pair(folder: Path, *, days: float = 30) -> Pair:
    return AUTHORITY.write_pair(folder, host="localhost", days=days)


def encrypt_key(pair: Pair) -> None:
    key = serialization.load_pem_private_key(pair.key.read_bytes(), None)
    pair.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, PASSPHRASE))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda pair: pair.certificate.unlink(), "cert.pem cannot be read: No such file or directory"),
        (lambda pair: pair.key.unlink(), "key.pem cannot be read: No such file or directory"),
        (lambda pair: pair.certificate.write_text("PK\x03\x04"), "cert.pem holds no certificate in PEM form"),
        (lambda pair: pair.certificate.write_text(pair.key.read_text()), "cert.pem holds no certificate in PEM form"),
        (lambda pair: pair.certificate.write_text(pair.certificate.read_text()[:300]), "cert.pem holds no certificate"),
        (lambda pair: pair.key.write_text(pair.certificate.read_text()), "key.pem holds no private key in PEM form"),
        (encrypt_key, "has a passphrase, which a server cannot type. Write it without one: openssl pkey -in "),
        (lambda pair: pair.certificate.write_text(AUTHORITY.certificate), "does not belong to the first certificate in "),
    ],
    ids=["no certificate", "no key", "a zip", "a key", "half a certificate", "not a key", "a passphrase", "issuer first"],
)
def test_a_pair_that_cannot_be_used_is_said_in_a_line_that_names_the_file(
    tmp_path: Path, spoil: Callable[[Pair], object], said: str
) -> None:
    pair = write_pair(tmp_path)
    assert list_hosts(pair.check()) == ["localhost"]
    spoil(pair)
    with pytest.raises(CertificateError, match=r".*") as refused:
        pair.check()
    assert said in str(refused.value)
    assert "PRIVATE" not in str(refused.value)


def test_a_certificate_out_of_time_is_served_at_a_start_and_never_takes_the_place_of_a_good_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    context = make_context()
    served = ServedCertificate(write_pair(tmp_path), partial(load_pair, context))
    leaf = write_pair(tmp_path, days=1).check()
    now = VirtualClock(unix_s=datetime.now(UTC).timestamp())
    clock.install(now)
    assert explain_time(leaf) == ""
    now.advance(2 * 86_400)
    assert explain_time(leaf).startswith("the certificate has expired at ")
    served.open()
    assert "The server goes on with it" in caplog.text
    good = write_pair(tmp_path).check()
    assert served.reload(), "one expired gives way to any"
    shown = shake_hands(context, TRUST, "localhost")
    assert x509.load_der_x509_certificate(shown) == good
    write_pair(tmp_path, days=1)
    assert not served.reload()
    assert shake_hands(context, TRUST, "localhost") == shown
    assert "expired" in caplog.records[-1].getMessage()
    now.unix_s -= timedelta(days=9).total_seconds()
    assert explain_time(good).endswith("Set this machine's clock")


def test_of_a_broken_renewal_nothing_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = make_context()
    served = ServedCertificate(write_pair(tmp_path), partial(load_pair, context))
    served.open()
    shown = shake_hands(context, TRUST, "localhost")
    old = (tmp_path / "key.pem").read_text()
    write_pair(tmp_path)
    (tmp_path / "key.pem").write_text(old)  # half of a renewal
    assert not served.reload()
    assert "does not belong to the first certificate" in caplog.records[-1].getMessage()
    assert shake_hands(context, TRUST, "localhost") == shown
    write_pair(tmp_path)
    assert served.reload()
    assert shake_hands(context, TRUST, "localhost") != shown


class Loop:
    """What a certificate asks of a server's loop."""

    def __init__(self) -> None:
        self.on_signal: dict[int, Callable[[], object]] = {}
        self.due: list[tuple[float, Callable[[], None]]] = []

    def add_signal_handler(self, number: int, call: Callable[[], object]) -> None:
        self.on_signal[number] = call

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        self.due.append((delay_s, call))


def test_changed_files_are_taken_over_at_the_next_look_and_on_a_signal_at_once(tmp_path: Path) -> None:
    context, loop = make_context(), Loop()
    served = ServedCertificate(write_pair(tmp_path), partial(load_pair, context))
    served.open()
    served.watch(cast("asyncio.AbstractEventLoop", loop))
    seen = [shake_hands(context, TRUST, "localhost")]

    def look() -> bytes:
        delay_s, call = loop.due.pop()
        assert (delay_s, loop.due) == (limits().core.tls_look_s, [])
        call()
        return shake_hands(context, TRUST, "localhost")

    assert look() == seen[0], "nothing has changed"
    (tmp_path / "key.pem").rename(tmp_path / "aside")
    assert look() == seen[0], "they are being replaced"
    write_pair(tmp_path)
    seen.append(look())
    write_pair(tmp_path)
    loop.on_signal[signal.SIGHUP]()
    seen.append(shake_hands(context, TRUST, "localhost"))
    assert len(set(seen)) == 3


def test_a_path_that_is_a_key_is_refused_without_being_said_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = write_pair(tmp_path)
    monkeypatch.setenv("MUSTER_TLS_KEY_FILE", str(pair.key))
    with pytest.raises(SettingError, match=r"MUSTER_TLS_KEY, not MUSTER_TLS_KEY_FILE, to that path") as refused:
        read_path("MUSTER_TLS_KEY")
    assert "PRIVATE" not in str(refused.value)
    assert not [one for one in list_variables() if "PRIVATE" in one.text]
