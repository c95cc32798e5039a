"""docs/settings.md is made from the limits in the code; ``python -m tests.unit.test_settings_page`` writes it anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from core.limits import Limits
from wire.limits import MIB, Bound, list_bounds

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
HEAD = """# Settings

Written by `python -m tests.unit.test_settings_page` from `core/limits.py` and the rows in that file; a test fails
when this page is older.

Every process of the server reads these environment variables once, when it starts. Any of them may be given as `NAME_FILE`, the
path of a file that holds the value; use that for secrets. A value that cannot be used stops the process with one line that says
why. Nodes have [options of their own](nodes.md#options). Bounds that no variable sets stand in `core/limits.py`,
`wire/limits.py` and `runner/limits.py`, each with its unit and what happens at it.

"""
SETTING_HEAD = "| Variable | Default | Unit | What it does, or what happens at it |\n|---|---|---|---|\n"
ROWS = """\
DATABASE_URL | `postgresql:///muster` | `postgresql://user:password@host:port/name`; `?host=/directory` for a Unix socket, \
other parameters as in libpq. Unless it says otherwise: `connect_timeout=5`, `keepalives_idle=5`, `keepalives_interval=2`, \
`keepalives_count=3`, `tcp_user_timeout=10000`
MUSTER_DATABASE_SILENCE_S
REDIS_URL | `redis://127.0.0.1:6379/0` | `redis://`, `rediss://` or `unix:///path/valkey.sock?db=0`
MUSTER_SECRET_KEY | none | Required. Signs sessions and encrypts the API keys of nodes; changing it signs every operator \
out, and those keys have to be given again. Long and random
MUSTER_DEBUG | off | Error pages with details. Never where others can reach it
MUSTER_ALLOWED_HOSTS | `localhost,127.0.0.1,[::1]` | Hosts, without a port, under which the control plane answers. \
`./muster up` adds its own
MUSTER_CSRF_TRUSTED_ORIGINS | empty | `https://muster.example.com`, when a proxy changes host or scheme
MUSTER_BEHIND_TLS | off | On when a TLS proxy stands in front: secure cookies, HSTS, and `X-Forwarded-Proto` of a trusted \
proxy is believed
MUSTER_TRUSTED_PROXIES | empty | Addresses and networks of the proxies in front, as control plane and gateway see them, \
separated by commas: `127.0.0.1,10.0.0.0/28`. The address of a client is then the last in `X-Forwarded-For` that is none of \
them. Empty = no forwarding header is believed. Name proxies alone: whoever calls from such an address chooses what the \
throttles and the logs take for its address
MUSTER_LOG_LEVEL | `info` | `debug` (or `trace`), `info`, `warning` (or `warn`), `error`, `critical`, in any case. For \
nodes too
MUSTER_ADMIN_PAGES | on | Load the admin's modules. Gateways and workers show no page: where each of them loads the server \
itself, off saves a second and 15 MB
MUSTER_STATIC_ROOT | `staticfiles` in the repository | Where `collectstatic` writes
MUSTER_STATIC_FINDERS | on | Serve static files from the packages. Off in an image that has collected them
**Approvals**
MUSTER_PUBLIC_URL | `http://localhost:8000` | Where people open the control plane. Passkeys are bound to this host name, \
policies name this origin, links in notices lead there. Changing it later means enrolling passkeys again and a new policy. \
HTTPS anywhere but on localhost
MUSTER_LOG_KEY | empty | Seed of the Ed25519 key that signs audit checkpoints: 32 bytes in base64url. Empty = no \
checkpoints. `./muster up` makes one
MUSTER_LOG_ORIGIN | `muster.local/audit` | Name of the log in its checkpoints
MUSTER_MAIL_FROM | empty | Sender of notices. Empty = no mail
MUSTER_MAIL_HOST | `localhost` | Mail server
MUSTER_MAIL_PORT | 25 | Its port
MUSTER_MAIL_USER | empty | User name there
MUSTER_MAIL_PASSWORD | empty | Its password
MUSTER_MAIL_TLS | off | STARTTLS
**Requests**
MUSTER_QUEUE_TIMEOUT_S
MUSTER_REQUEST_TIMEOUT_S
MUSTER_CANARY_INTERVAL_S
MUSTER_NO_NODE_WAIT_S
MUSTER_STREAM_PING_S
MUSTER_TOKENIZERS_DIR | empty | Folder with a folder for each model's `tokenizer.json` (and `tokenizer_config.json`, \
`chat_template.jinja`), named on the model's page; empty = nodes are asked, or counts are estimated
MUSTER_ACCEPT_TIMEOUT_S
MUSTER_CLIENT_WRITE_TIMEOUT_S
MUSTER_HEADER_TIMEOUT_S
MUSTER_BODY_TIMEOUT_S
MUSTER_SHUTDOWN_GRACE_S
MUSTER_MAX_QUEUE_LEN
MUSTER_MAX_BODY_BYTES
MUSTER_MAX_AUDIO_MB
MUSTER_MAX_PROMPT_CHARS
MUSTER_MAX_TOKENS_CAP
MUSTER_RATE_LIMIT_RPM
MUSTER_MAX_REQUEUES
MUSTER_MAX_STREAM_BYTES
MUSTER_MAX_BUFFER_BYTES
MUSTER_PUBLIC_MODEL_LIST | on | `GET /v1/models` without a key
MUSTER_CORS_ORIGINS | empty | Origins whose pages may call `/v1/…` from a browser, separated by commas \
(`https://chat.example.com`), or `*` for all
MUSTER_METRICS_REQUIRE_TOKEN | off | `GET /metrics` always asks for an admin token; otherwise only of callers on other \
machines or behind a proxy
MUSTER_REQUEST_RETENTION_DAYS
MUSTER_KEEP_ENGINE_ERRORS | on | Request records and logs keep what an engine said when it failed or refused: at most 300 \
characters, cut before the first 20 that the request holds too. A node has [the same switch](nodes.md#options) for its own \
log
**Playground**
MUSTER_PLAYGROUND_GATEWAY_URL | `http://127.0.0.1:8080` | Where the control plane asks for the playground: scheme, host and \
port of a gateway, or of what stands before them. `./muster up` sets it
MUSTER_GATEWAY_PUBLIC_URL | the one above | Where clients reach the gateways; what the playground's code names
**Several gateways**
MUSTER_INTERNAL_URL | empty | Where other gateways reach this one
MUSTER_CLUSTER_SECRET | empty | What gateways show each other; without it they do not reach each other's nodes
MUSTER_GATEWAY_URLS | empty | Public address of each gateway by itself, separated by commas: what our own nodes are told to \
dial as well
**Nodes**
MUSTER_HEARTBEAT_INTERVAL_S
MUSTER_STALE_AFTER_S
MUSTER_OFFLINE_AFTER_S
MUSTER_BRIDGE_PING_INTERVAL_S
MUSTER_BRIDGE_PONG_WINDOW_S
MUSTER_RECLAIM_GRACE_S
MUSTER_DRAIN_TIMEOUT_S
MUSTER_WORKER_AUTH_FAILURES
MUSTER_WORKER_AUTH_BLOCK_S
MUSTER_ALLOW_QUERY_SECRET | on | Accept `?worker_secret=`, as old workers send it
MUSTER_DIRECT_HOSTS | empty | Host names and networks that nodes may register as `public_base_url`, for example \
`gpu.example.com,10.20.0.0/16`; `private` = every private network (RFC 1918, RFC 4193). Control plane, worker and gateways \
read it when they start
MUSTER_DIRECT_ALLOW_LOOPBACK | off | Allow loopback and metadata addresses among them. For tests on one machine
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
            yield f"| {name} | | | |\n"
        elif name in settings:
            yield _render_row(name, settings[name])
        else:
            default, text = said
            yield f"| `{name}` | {default} | | {text} |\n"


def _render_row(name: str, bound: Bound) -> str:
    unit = "MiB" if bound.factor == MIB else bound.unit
    default = bound.default / bound.factor
    shown = f"{default:g}" if abs(default) < 1e6 else f"{default:.0f}"
    return f"| `{name}` | {shown} | {unit} | {bound.then} |\n"


def test_the_page_of_the_settings_is_what_the_limits_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m tests.unit.test_settings_page"


def test_every_bound_of_the_server_that_a_variable_sets_has_its_place_in_the_list() -> None:
    assert set(list_settings(Limits())) - {line.split(" | ")[0] for line in ROWS.splitlines()} == set()


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
