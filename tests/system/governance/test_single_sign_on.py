"""Single sign-on against a real issuer on this machine, and what a wrong or hostile one gets."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest
import requests
from allauth.socialaccount.models import SocialAccount
from allauth.socialaccount.providers.oauth2.client import OAuth2Error
from cryptography.hazmat.primitives.asymmetric import rsa
from django.contrib.sessions.models import Session
from django.test import Client
from pytest_django import Settings

from core.issuer import Issuer
from core.models import Membership, User
from core.roles import Role, list_roles
from governance import oidc
from governance.members import change_roles
from governance.people import create_invitation
from tests.fakes.limits import set_limits
from tests.fakes.nodes import audited
from wire import clock

# The issuer of the tests speaks of its libraries' next versions.
pytestmark = [pytest.mark.django_db, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CLAIMS: dict[str, Any] = {
    "preferred_username": "ana",
    "given_name": "Ana",
    "family_name": "Ito",
    "email": "ana@example.com",
    "email_verified": True,
    "groups": ["gpu-operators"],
}


@pytest.fixture(scope="module")
def issuer_url() -> Iterator[str]:
    with warnings.catch_warnings():
        import authlib.deprecate  # type: ignore[import-untyped]  # it wants its warnings shown, whatever was said before

        assert authlib.deprecate
        warnings.simplefilter("ignore")
        from oidc_provider_mock import run_server_in_thread  # type: ignore[import-untyped]
    with pytest.MonkeyPatch.context() as patch, run_server_in_thread() as server:
        patch.setenv("AUTHLIB_INSECURE_TRANSPORT", "1")
        yield f"http://localhost:{server.server_port}"


@pytest.fixture
def issuer(issuer_url: str, settings: Settings) -> Issuer:
    oidc.forget_configs()
    found = Issuer(
        url=issuer_url, client_id="muster", client_secret="a secret of tests", name="Example ID",
        scopes=("openid", "profile", "email"), groups_claim="groups",
        roles={"gpu-operators": ("operator",), "bosses": ("owner",), "research": ("tenant-admin:research",)},
        default_role="none", allowed_domains=(),
    )  # fmt: skip
    settings.OIDC, settings.PUBLIC_URL = found, "http://testserver"
    return found


def tell(issuer: Issuer, sub: str = "sub-1", **claims: Any) -> None:
    """Let the issuer say this of somebody."""
    answer = requests.put(f"{issuer.url}/users/{sub}", json={**CLAIMS, **claims}, timeout=5)
    assert answer.status_code == 204


@dataclass
class Visit:
    """A browser between our page and the issuer's."""

    client: Client
    query: dict[str, str]

    def allow(self, sub: str = "sub-1") -> str:
        """Return where the issuer leads once somebody has signed in there."""
        issuer = self.query.pop("issuer")
        answer = requests.post(
            f"{issuer}/oauth2/authorize", params=self.query, data={"sub": sub}, allow_redirects=False, timeout=5
        )
        assert answer.status_code == 302, answer.text
        return answer.headers["location"].removeprefix("http://testserver")


def begin(issuer: Issuer, client: Client | None = None, *, url: str = "/sign-in/oidc") -> Visit:
    client = client or Client()
    answer = client.get(url)
    assert answer.status_code == 302, answer.content
    parts = urlsplit(answer["location"])
    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
    return Visit(client, {**query, "issuer": f"{parts.scheme}://{parts.netloc}"})


def sign_in(issuer: Issuer, sub: str = "sub-1") -> tuple[Client, Any]:
    visit = begin(issuer)
    return visit.client, visit.client.get(visit.allow(sub))


def is_signed_in(client: Client) -> bool:
    return "_auth_user_id" in client.session


def test_somebody_new_gets_the_roles_of_their_groups_and_keeps_no_more_than_those(issuer: Issuer) -> None:
    tell(issuer)
    visit = begin(issuer, url="/sign-in/oidc?next=/admin/nodes/node/")
    assert visit.query["code_challenge_method"] == "S256"
    assert visit.query["redirect_uri"] == "http://testserver/sign-in/oidc/callback"
    assert {"state", "nonce", "code_challenge"} <= set(visit.query)
    answer = visit.client.get(visit.allow())
    assert (answer.status_code, answer["location"]) == (302, "/admin/nodes/node/")
    ana = User.objects.get(username="ana")
    assert (ana.email, ana.first_name, ana.is_staff, ana.is_superuser) == ("ana@example.com", "Ana", True, False)
    assert (list_roles(ana), ana.has_usable_password()) == ([Role.OPERATOR], False)
    assert visit.client.get("/admin/nodes/node/").status_code == 200
    assert [event.detail["by"] for event in audited("sign-in.open")] == ["oidc"]
    # Another group at the next sign-in, in the session that is open as well.
    tell(issuer, groups=["research"])
    other, _answer = sign_in(issuer)
    assert (list_roles(User.objects.get(pk=ana.pk)), User.objects.get(pk=ana.pk).is_staff) == ([], False)
    assert Membership.objects.get(user=ana).role == Role.TENANT_ADMIN
    assert visit.client.get("/admin/nodes/node/").status_code == 302
    # No group at all: the sessions end.
    tell(issuer, groups=[])
    client, answer = sign_in(issuer)
    assert answer.status_code == 403
    assert "none of your groups" in answer.content.decode()
    assert not Session.objects.filter(session_key__in=[one.session.session_key for one in (visit.client, other)]).exists()
    assert not is_signed_in(client)
    assert not Membership.objects.exists()


def test_roles_that_owners_gave_here_stay_and_an_account_is_connected_only_by_who_is_signed_in(issuer: Issuer) -> None:
    boss = User.objects.create_superuser("ana", password="a password for tests only")
    tell(issuer)
    client, answer = sign_in(issuer)
    assert "local account named ana" in answer.content.decode()  # neither name nor e-mail make somebody who they are
    assert not is_signed_in(client)
    client.post("/sign-in/", {"name": "ana", "password": "a password for tests only"})
    page = client.post("/sign-in/oidc/connect")
    link = page.content.decode().split('class="button" href="')[1].split('"')[0].replace("&amp;", "&")
    query = {name: values[0] for name, values in parse_qs(urlsplit(link).query).items()}
    answer = client.get(Visit(client, {**query, "issuer": issuer.url}).allow())
    assert answer["location"] == "/sign-in/keys"
    client, answer = sign_in(issuer)
    assert int(client.session["_auth_user_id"]) == boss.pk
    assert list_roles(User.objects.get(pk=boss.pk)) == [Role.OWNER, Role.OPERATOR]
    client.post("/sign-in/oidc/disconnect")
    assert list_roles(User.objects.get(pk=boss.pk)) == [Role.OWNER]
    assert [len(audited(name)) for name in ("sign-in.connect", "sign-in.disconnect")] == [1, 1]


def test_an_account_is_not_connected_to_who_signed_in_meanwhile(issuer: Issuer) -> None:
    tell(issuer)
    ben, eve = User.objects.create_user("ben"), User.objects.create_user("eve")
    client = Client()
    client.force_login(ben)
    page = client.post("/sign-in/oidc/connect").content.decode()
    link = page.split('class="button" href="')[1].split('"')[0].replace("&amp;", "&")
    query = {name: values[0] for name, values in parse_qs(urlsplit(link).query).items()}
    state = dict(client.session)["socialaccount_states"]
    client.force_login(eve)
    session = client.session
    session["socialaccount_states"] = state
    session.save()
    answer = client.get(Visit(client, {**query, "issuer": issuer.url}).allow())
    assert answer.status_code == 403
    assert not SocialAccount.objects.exists()


def test_state_and_code_work_once_and_in_the_browser_that_asked(issuer: Issuer) -> None:
    tell(issuer)
    visit = begin(issuer)
    back = visit.allow()
    assert Client().get(back).status_code == 403
    wrong = back.replace(visit.query["state"], "another")
    assert visit.client.get(wrong).status_code == 403
    assert visit.client.get(back).status_code == 302
    # The code again, with a state of its own: the issuer refuses it.
    again = begin(issuer)
    replayed = back.replace(visit.query["state"], again.query["state"])
    assert again.client.get(replayed).status_code == 403
    assert not is_signed_in(again.client)
    # A code that somebody else got, with their verifier's challenge and nonce.
    mine, theirs = begin(issuer), begin(issuer)
    planted = theirs.allow().replace(theirs.query["state"], mine.query["state"])
    assert mine.client.get(planted).status_code == 403
    assert not is_signed_in(mine.client)


def test_an_answer_that_names_another_issuer_is_refused(issuer: Issuer) -> None:
    tell(issuer)
    visit = begin(issuer)
    assert visit.client.get(f"{visit.allow()}&iss=https://evil.example").status_code == 403
    denied = begin(issuer)
    answer = denied.client.get(f"/sign-in/oidc/callback?error=access_denied&state={denied.query['state']}")
    assert "Example ID did not let you in" in answer.content.decode()


GOOD = {"iss": "http://issuer.test", "aud": "muster", "sub": "sub-1", "nonce": "n-1", "groups": ["gpu-operators"]}


def bad_tokens() -> dict[str, dict[str, object]]:
    return {
        "wrong nonce": {"nonce": "n-2"},
        "no nonce": {"nonce": None},
        "other issuer": {"iss": "https://evil.example"},
        "token of another client": {"aud": "somebody-else"},
        "issued to another client": {"aud": ["muster", "other"], "azp": "other"},
        "expired": {"exp": -3600},
        "no subject": {"sub": None},
        "key of somebody else": {"_key": "other"},
        "signed with the client's secret": {"_alg": "HS256"},
        "not signed": {"_alg": "none"},
        "no end": {"exp": None},
    }


class _Answers:
    """What an issuer's addresses answer, without a network."""

    def __init__(self, key: rsa.RSAPrivateKey, url: str) -> None:
        public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key()))
        self._told = {f"{url}/jwks": {"keys": [{**public, "kid": "k1", "alg": "RS256", "use": "sig"}]}}

    def __enter__(self) -> _Answers:
        return self

    def __exit__(self, *_error: object) -> None: ...

    def get(self, url: str, **_options: object) -> _Answers:
        self._body = self._told[url]
        return self

    def raise_for_status(self) -> None: ...

    def json(self) -> object:
        return self._body


@pytest.fixture(scope="module")
def keys() -> tuple[rsa.RSAPrivateKey, rsa.RSAPrivateKey]:
    return rsa.generate_private_key(65537, 2048), rsa.generate_private_key(65537, 2048)


def make_token(keys: tuple[rsa.RSAPrivateKey, rsa.RSAPrivateKey], **changes: object) -> str:
    now = int(clock.unix_s())
    alg, which = changes.pop("_alg", "RS256"), changes.pop("_key", "own")
    claims = {**GOOD, "iat": now, "exp": now + 300, **changes}
    if isinstance(claims["exp"], int) and claims["exp"] < 0:
        claims["exp"] = now + claims["exp"]
    claims = {name: value for name, value in claims.items() if value is not None}
    key: Any = {"RS256": keys[which == "other"], "HS256": "a secret of tests that is long enough", "none": None}[str(alg)]
    return jwt.encode(claims, key, algorithm=str(alg), headers={"kid": "k1"})


@pytest.mark.parametrize("case", ["good", *bad_tokens()])
def test_a_token_that_is_not_for_us_signs_nobody_in(
    case: str, issuer: Issuer, settings: Settings, keys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://issuer.test"
    settings.OIDC = replace(issuer, url=url)
    oidc.remember_config(url, {"issuer": url, "jwks_uri": f"{url}/jwks"})
    reader = oidc.IssuerClient(Client().get("/sign-in/").wsgi_request, url)
    monkeypatch.setattr(reader, "open_session", lambda: _Answers(keys[0], url))
    response = {"access_token": "t", "id_token": make_token(keys, **bad_tokens().get(case, {}))}
    if case == "good":
        assert reader.read_claims(response, nonce="n-1")["sub"] == "sub-1"
        return
    with pytest.raises(OAuth2Error):
        reader.read_claims(response, nonce="n-1")


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"email_verified": False}, "verified e-mail"),
        ({"email": "ana@evil.example"}, "verified e-mail"),
        ({"email": "ana@example.com.evil.example"}, "verified e-mail"),
        ({"groups": ["gpu-operators-2"]}, "none of your groups"),
        ({"preferred_username": "<script>"}, "no name that can be used"),
        ({"preferred_username": "ADMIN"}, "local account named"),
    ],
)
def test_who_may_not_come_in_is_told_why_and_leaves_no_account(
    claims: dict[str, Any], said: str, issuer: Issuer, settings: Settings
) -> None:
    User.objects.create_superuser("admin")
    settings.OIDC = replace(issuer, allowed_domains=("example.com",))
    tell(issuer, **claims)
    client, answer = sign_in(issuer)
    assert answer.status_code == 403
    assert said in answer.content.decode()
    assert not is_signed_in(client)
    assert User.objects.count() == 1


def test_an_unverified_address_is_not_kept(issuer: Issuer) -> None:
    tell(issuer, email_verified=False)
    sign_in(issuer)
    assert User.objects.get(username="ana").email == ""


def test_the_last_owner_is_not_taken_by_a_group(issuer: Issuer) -> None:
    tell(issuer, groups=["bosses"])
    sign_in(issuer)
    assert User.objects.get(username="ana").is_superuser
    tell(issuer, groups=["gpu-operators"])
    sign_in(issuer)
    assert User.objects.get(username="ana").is_superuser
    change_roles(person=User.objects.create_user("ben"), roles=[Role.OWNER], actor="t")
    sign_in(issuer)
    assert not User.objects.get(username="ana").is_superuser


def test_an_issuer_that_is_away_leaves_local_accounts_and_says_so(issuer: Issuer, settings: Settings) -> None:
    settings.OIDC = replace(issuer, url="http://localhost:1")
    User.objects.create_superuser("admin", password="a password for tests only")
    client = Client()
    page = client.get("/sign-in/").content.decode()
    assert "Sign in with Example ID" in page
    answer = client.get("/sign-in/oidc")
    assert (answer.status_code, "does not answer" in answer.content.decode()) == (403, True)
    assert "form-action &#x27;self&#x27;" not in answer["Content-Security-Policy"]
    answer = client.post("/sign-in/", {"name": "admin", "password": "a password for tests only"})
    assert answer.status_code == 302


def test_without_an_issuer_there_is_no_single_sign_on(settings: Settings) -> None:
    settings.OIDC = None
    assert [Client().get(f"/sign-in/oidc{path}").status_code for path in ("", "/callback")] == [404, 404]
    assert "/sign-in/oidc" not in Client().get("/sign-in/").content.decode()


def test_who_gets_roles_from_groups_signs_in_there_first(issuer: Issuer, settings: Settings) -> None:
    tell(issuer)
    sign_in(issuer)
    ana = User.objects.get(username="ana")
    ana.set_password("a password for tests only")
    ana.save(update_fields=["password"])
    told = {"name": "ana", "password": "a password for tests only"}
    assert Client().post("/sign-in/", told).status_code == 302
    set_limits(governance={"oidc_session_s": -60})
    assert "were read too long ago" in Client().post("/sign-in/", told).content.decode()
    settings.LOCAL_SIGN_IN = "owners"
    assert "Only owners sign in here" in Client().post("/sign-in/", told).content.decode()
    User.objects.filter(pk=ana.pk).update(is_superuser=True)
    assert Client().post("/sign-in/", told).status_code == 302


def test_a_session_of_single_sign_on_ends_sooner(issuer: Issuer) -> None:
    tell(issuer)
    client, _answer = sign_in(issuer)
    assert client.get("/admin/").status_code == 200
    set_limits(governance={"oidc_session_s": -1})
    assert client.get("/admin/").status_code == 302


def test_an_invitation_is_no_way_round_single_sign_on(issuer: Issuer, settings: Settings) -> None:
    settings.LOCAL_SIGN_IN = "owners"
    _row, text = create_invitation(user=User.objects.create_user("ben"), actor="t")
    assert "Only owners" in Client().get(f"/sign-in/invitation/{text}").content.decode()
