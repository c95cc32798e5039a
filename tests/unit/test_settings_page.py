"""docs/settings.md is made from the limits in the code; ``python -m tests.unit.test_settings_page`` writes it anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from core.limits import Limits
from wire.limits import MIB, Bound, list_bounds

_DAY_S = 86_400
PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
HEAD = """# Settings

`python -m tests.unit.test_settings_page` writes this page from `core/limits.py` and from rows of its own.

Servers read these environment variables when they start. `NAME_FILE` names a file that holds the value of `NAME`; use that for
secrets. `./muster config` shows all of them with what holds and where it was set, `./muster config --check` what is wrong.
Nodes have [options of their own](nodes.md#options). `core/limits.py` has the bounds that no variable sets.

"""
SETTING_HEAD = "| Variable | Default | What it does |\n|---|---|---|\n"
ROWS = """\
DATABASE_URL | `postgresql:///muster` | `postgresql://user:password@host:port/name`, with parameters as in libpq; \
`?host=/directory` for a Unix socket. Added where they are missing: `connect_timeout=5`, `keepalives_idle=5`, \
`keepalives_interval=2`, `keepalives_count=3`, `tcp_user_timeout=10000`
MUSTER_DATABASE_SILENCE_S
REDIS_URL | `redis://127.0.0.1:6379/0` | `redis://`, `rediss://`, `unix:///path/valkey.sock?db=0`, or `sentinel://USER:PASSWORD@HOST:26379,HOST:26379/MASTER?db=0`
MUSTER_SECRET_KEY | none | Required; long and random. It signs sessions and encrypts the API keys of nodes, \
which a change makes unreadable
MUSTER_DEBUG | off | Error pages with details. Never where others can reach it
MUSTER_ALLOWED_HOSTS | `localhost,127.0.0.1,[::1]` | Hosts, without a port, under which the control plane answers. \
`./muster up` adds its own
MUSTER_CSRF_TRUSTED_ORIGINS | empty | `https://muster.example.com`, when a proxy changes host or scheme
MUSTER_BEHIND_TLS | off | A TLS proxy stands in front: secure cookies, HSTS, and a trusted proxy's `X-Forwarded-Proto` counts
MUSTER_TLS_CERT | empty | Path of a certificate with its chain (PEM): the servers speak TLS themselves. Also `--tls-cert`
MUSTER_TLS_KEY | the one above | Path of its key, without a passphrase. Also `--tls-key`
MUSTER_TRUSTED_PROXIES | empty | Addresses and networks of proxies: `127.0.0.1,10.0.0.0/28`. The last address in \
`X-Forwarded-For` that is none of them is the client's, for throttles and logs
MUSTER_LOG_LEVEL | `info` | `debug` (`trace`), `info`, `warning` (`warn`), `error`, `critical`. For nodes too
MUSTER_LOG_FORMAT | `auto` | `json`, `console`, or `auto`: text where standard error is a terminal, else JSON. For nodes too
OTEL_EXPORTER_OTLP_ENDPOINT | empty | Where [traces](observe.md#traces) go: `http://localhost:4318`. Empty = none are made. \
For nodes too, as OpenTelemetry's other variables
OTEL_TRACES_SAMPLER | `parentbased_always_on` | Which are kept, with `OTEL_TRACES_SAMPLER_ARG`
MUSTER_ACCESS_LOG | `on` | [A line for each request](observe.md#access-log): `on`, `errors` (those that were not served), `off`
MUSTER_ACCESS_LOG_EVERY
MUSTER_LANGUAGE | `en` | Language of mail and chat messages: `en`, `de`. Pages take the reader's
MUSTER_ADMIN_PAGES | on | Off saves gateways and workers a second and 15 MB
MUSTER_STATIC_ROOT | `staticfiles` in the repository | Where `collectstatic` writes
MUSTER_STATIC_FINDERS | on | Serve static files from the packages, uncollected
**Single sign-on** ([people](people.md))
MUSTER_OIDC_ISSUER | empty | Address of an OpenID Connect issuer. Empty = local accounts alone
MUSTER_OIDC_CLIENT_ID | empty | Of the client that the issuer knows; its redirect URI is `PUBLIC_URL/sign-in/oidc/callback`
MUSTER_OIDC_CLIENT_SECRET | empty | Its secret
MUSTER_OIDC_NAME | host of the issuer | What the button on the sign-in page says
MUSTER_OIDC_SCOPES | `openid profile email` | What is asked for; some issuers send groups only for a scope of that name
MUSTER_OIDC_GROUPS_CLAIM | `groups` | Claim with the groups; a path such as `realm_access.roles` works
MUSTER_OIDC_ROLES | empty | `group=role,group=role`, or JSON: `owner`, `operator`, `approver`, `viewer`, \
`tenant-admin:TENANT`, `tenant-viewer:TENANT`
MUSTER_OIDC_DEFAULT_ROLE | `none` | Role of who has no such group. `none` lets nobody in without one
MUSTER_OIDC_ALLOWED_DOMAINS | empty | Domains of verified e-mail addresses. Empty = all
MUSTER_OIDC_SESSION_S
MUSTER_LOCAL_SIGN_IN | `all` | `owners`: beside single sign-on, only owners sign in by password or passkey
**Approvals**
MUSTER_PUBLIC_URL | `http://localhost:8000` | Where people open the control plane; HTTPS anywhere but on localhost. Passkeys \
and policies are bound to it
MUSTER_LOG_KEY | empty | Seed of the Ed25519 key that signs audit checkpoints: 32 bytes in base64url. Empty = no \
checkpoints. `./muster up` makes one
MUSTER_LOG_ORIGIN | `muster.local/audit` | Name of the log in its checkpoints
MUSTER_MAIL_FROM | empty | Sender of notices. Empty = no mail
MUSTER_ALERT_MAIL | `impaired` | Alerts at least so urgent are mailed to operators: `down`, `impaired`, `notice`, or `none`
MUSTER_ALERT_RETENTION_DAYS
MUSTER_BACKUP_AGE_DAYS
MUSTER_MAIL_HOST | `localhost` | Mail server
MUSTER_MAIL_PORT | 25 | Its port
MUSTER_MAIL_USER | empty | User name
MUSTER_MAIL_PASSWORD | empty | Password
MUSTER_MAIL_TLS | off | STARTTLS
**Requests**
MUSTER_QUEUE_TIMEOUT_S
MUSTER_REQUEST_TIMEOUT_S
MUSTER_CANARY_INTERVAL_S
MUSTER_NO_NODE_WAIT_S
MUSTER_STREAM_PING_S
MUSTER_TOKENIZERS_DIR | empty | Folder with a folder for each model, named on the model's page: `tokenizer.json`, \
`tokenizer_config.json`, `chat_template.jinja`
MUSTER_ACCEPT_TIMEOUT_S
MUSTER_CLIENT_WRITE_TIMEOUT_S
MUSTER_HEADER_TIMEOUT_S
MUSTER_BODY_TIMEOUT_S
MUSTER_SHUTDOWN_GRACE_S
MUSTER_MAX_QUEUE_LEN
MUSTER_MAX_TENANT_QUEUE_LEN
MUSTER_DEGRADE_WAIT_S
MUSTER_REFUSE_WAIT_S
MUSTER_STARVATION_S
MUSTER_MAX_BODY_BYTES
MUSTER_MAX_AUDIO_MB
MUSTER_MAX_PROMPT_CHARS
MUSTER_MAX_TOKENS_CAP
MUSTER_RATE_LIMIT_RPM
MUSTER_BUDGET_SHARE_PERCENT
MUSTER_SCORE_LOAD
MUSTER_SCORE_ACTIVE
MUSTER_SCORE_LATENCY
MUSTER_SCORE_RELIABILITY
MUSTER_SCORE_AFFINITY
MUSTER_SESSION_AFFINITY_S
MUSTER_DECISION_CANDIDATES
MUSTER_MAX_REQUEUES
MUSTER_MAX_STREAM_BYTES
MUSTER_MAX_BUFFER_BYTES
MUSTER_LISTEN | `127.0.0.1:8080` | Where the gateway listens without an option; `./muster up` takes the host for the control \
plane too
MUSTER_REQUIRE_API_KEYS | on | Off lets requests [without a key](from-modelrelay.md#without-keys) in
MUSTER_KEYLESS_ADDRESSES | empty | Addresses beyond loopback where that holds, such as `0.0.0.0`
MUSTER_ADMIN_TOKEN | empty | An admin token of [your own](from-modelrelay.md#your-own-secrets), at least 16 characters
MUSTER_PUBLIC_MODEL_LIST | on | `GET /v1/models` without a key
MUSTER_CORS_ORIGINS | empty | Origins whose pages may call `/v1/…`, separated by commas, or `*`
MUSTER_METRICS_REQUIRE_TOKEN | off | `GET /metrics` asks everybody for an admin token
MUSTER_METRICS_TENANTS | off | [Series](observe.md#metrics) of gateways name tenants
MUSTER_REQUEST_RETENTION_DAYS
MUSTER_CHART_RETENTION_DAYS
MUSTER_KEEP_ENGINE_ERRORS | on | Records and logs keep what an engine said when it failed or refused, without what it \
repeats of the request
**Playground**
MUSTER_PLAYGROUND_GATEWAY_URL | `http://127.0.0.1:8080` | The gateway that the playground asks: scheme, host and port. \
`./muster up` sets it
MUSTER_GATEWAY_PUBLIC_URL | the one above | Where clients reach the gateways
**Several gateways**
MUSTER_CURRENCY | `EUR` | What prices and costs are in; a word for people, nothing is converted
MUSTER_INTERNAL_URL | empty | Where other gateways reach this one
MUSTER_CLUSTER_SECRET | empty | What gateways show each other; without it they do not reach each other's nodes
MUSTER_GATEWAY_URLS | empty | Public address of each gateway, separated by commas: our own nodes dial them all
**Nodes**
MUSTER_HEARTBEAT_INTERVAL_S
MUSTER_STALE_AFTER_S
MUSTER_OFFLINE_AFTER_S
MUSTER_BRIDGE_PING_INTERVAL_S
MUSTER_BRIDGE_PONG_WINDOW_S
MUSTER_BRIDGE_REFRESH_S
MUSTER_AGENT_HEARTBEAT_S
MUSTER_AGENT_RAMP_S
MUSTER_TICKET_S
MUSTER_TICKET_KEY_DAYS
MUSTER_NODE_CERTIFICATE_DAYS
MUSTER_AGENT_JWKS | empty | Keys whose holders may name [agents](fleet.md#agents) by a JWT: a JWK set, as a file or a URL
MUSTER_RECLAIM_GRACE_S
MUSTER_DRAIN_TIMEOUT_S
MUSTER_NODE_RETENTION_DAYS
MUSTER_WORKER_AUTH_FAILURES
MUSTER_WORKER_AUTH_BLOCK_S
MUSTER_WORKER_SECRET | empty | A node credential of [your own](from-modelrelay.md#your-own-secrets), at least 16 characters
MUSTER_PROVIDER | `local` | The provider that its nodes belong to
MUSTER_ALLOW_QUERY_SECRET | on | Accept `?worker_secret=`, as old workers send it
MUSTER_REJECT_UNVERSIONED_WORKERS | off | Refuse workers that name no `protocol_version`, as old ones do
MUSTER_DIRECT_HOSTS | empty | Hosts and networks that nodes may register as `public_base_url`: `gpu.example.com,10.20.0.0/16`; \
`private` = every private network. All servers need it
MUSTER_DIRECT_ALLOW_LOOPBACK | off | Allow loopback and metadata addresses among them, for tests on one machine
"""
"""In operators' order: a setting that is no bound with all that is said of it, a bound by its name, a heading in stars."""


def list_settings(limits: Limits) -> dict[str, Bound]:
    sections = (getattr(limits, section.name) for section in fields(limits))
    return {bound.setting: bound for section in sections for bound in list_bounds(section) if bound.setting}


def render() -> str:
    return "".join([HEAD, SETTING_HEAD, *_render_rows(list_settings(Limits()))])


def _render_rows(settings: dict[str, Bound]) -> Iterator[str]:
    for line in ROWS.splitlines():
        name, *said = line.split(" | ")
        if name.startswith("**"):
            yield f"| {name} | | |\n"
        elif name in settings:
            yield _render_row(name, settings[name])
        else:
            default, text = said
            yield f"| `{name}` | {default} | {text} |\n"


def _render_row(name: str, bound: Bound) -> str:
    unit = {MIB: "MiB", _DAY_S: "days"}.get(bound.factor, bound.unit)
    default = bound.default / bound.factor
    shown = f"{default:g}" if abs(default) < 1e6 else f"{default:.0f}"
    return f"| `{name}` | {shown} {unit} | {bound.then} |\n"


def test_the_page_of_the_settings_is_what_the_limits_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m tests.unit.test_settings_page"


def test_every_bound_of_the_server_that_a_variable_sets_has_its_place_in_the_list() -> None:
    assert set(list_settings(Limits())) - {line.split(" | ")[0] for line in ROWS.splitlines()} == set()


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
