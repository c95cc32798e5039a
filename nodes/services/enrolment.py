"""Enrolment: how a machine becomes a node. What is pasted on it, what it has reached since, and codes that need no sign-in.

With a setup code somebody without an account reads a node credential once, on the page ``/setup`` of a gateway. Only its hash
is stored; it works once and for ``setup_code_s``.
"""

from __future__ import annotations

import hashlib
import secrets
import shlex
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from django.core import signing
from django.db import transaction
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from core.limits import limits
from governance.audit import record_event
from governance.operations.approvals import active_policy
from governance.operations.policies import list_policy_versions
from nodes.errors import BadRequest
from nodes.models import Node, NodeCredential, SetupCode, open_credential, with_clock
from nodes.services.availability import explain_unreachable, judge_status
from nodes.services.credentials import create_credential
from wire import COMMAND, IS_CHECKOUT, clock
from wire.contract import NodeStatus

if TYPE_CHECKING:
    from core.admin_pages import Text  # a gateway does not load pages

_ALPHABET = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
"""Of codes: nothing that looks like something else. Ten of 32 are 50 bits."""
_SALT = "muster setup"
_PROGRAM = "$PWD/muster" if IS_CHECKOUT else "$(command -v muster)"
"""Where a service finds the launcher; the shell that writes its file knows."""


class Software(StrEnum):
    """What the machine runs."""

    OURS = "ours"
    OLLAMA = "ollama"
    VLLM = "vllm"
    LLAMA_SERVER = "llama-server"
    LM_STUDIO = "lm-studio"
    OPENAI = "openai"
    MODELRELAY = "modelrelay"
    AGENT = "agent"


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to "what does it run": its name, what it means, and where the backend usually listens."""

    software: Software
    label: Text
    help_text: Text
    backend: str = ""


CHOICES = (
    Choice(Software.OURS, gettext_lazy("Muster's engines"), gettext_lazy("It loads models itself, under approval.")),
    Choice(Software.OLLAMA, "Ollama", gettext_lazy("It runs already and listens on port 11434."), "http://127.0.0.1:11434"),
    Choice(Software.VLLM, "vLLM", gettext_lazy("It runs already and listens on port 8000."), "http://127.0.0.1:8000"),
    Choice(
        Software.LLAMA_SERVER,
        "llama-server",
        gettext_lazy("It runs already and listens on port 8080."),
        "http://127.0.0.1:8080",
    ),
    Choice(Software.LM_STUDIO, "LM Studio", gettext_lazy("Its server listens on port 1234."), "http://127.0.0.1:1234"),
    Choice(
        Software.OPENAI,
        gettext_lazy("Another OpenAI server"),
        gettext_lazy("Any address that ends in /v1."),
        "http://127.0.0.1:9000",
    ),
    Choice(Software.MODELRELAY, gettext_lazy("A ModelRelay worker"), gettext_lazy("Its program stays as it is.")),
    Choice(
        Software.AGENT, gettext_lazy("An agent of yours"), gettext_lazy("A program that speaks the contract of GPU agents.")
    ),
)


class Platform(StrEnum):
    """How the program is started on the machine."""

    TERMINAL = "terminal"
    SYSTEMD = "systemd"
    LAUNCHD = "launchd"
    DOCKER = "docker"


PLATFORMS: dict[Platform, Text] = {
    Platform.TERMINAL: gettext_lazy("In a terminal, to try it"),
    Platform.SYSTEMD: gettext_lazy("As a service (Linux, systemd)"),
    Platform.LAUNCHD: gettext_lazy("As a service (macOS, launchd)"),
    Platform.DOCKER: gettext_lazy("In a container (Docker)"),
}


@dataclass(frozen=True, slots=True)
class Command:
    """What can be pasted into a shell on the machine, as it stands. ``note``: what has to be there before."""

    platform: Platform
    label: Text
    text: str
    note: Text = ""


def write_commands(software: Software, *, gateway: str, token: str, provider: str, name: str) -> list[Command]:
    """Return the ways to start the program of a node, gateway and credential filled in; the first is the simplest. Pure.

    ``name``: of the node, empty = the machine's own.
    """
    if software is Software.MODELRELAY:
        worker = f"PROXY_URL={shlex.quote(gateway)} WORKER_SECRET={shlex.quote(token)} \\\n  modelrelay-worker --models MODEL"
        note = _("Replace MODEL by the names of its models. BACKEND_URL stays as it is.")
        return [Command(Platform.TERMINAL, PLATFORMS[Platform.TERMINAL], worker, note)]
    if software is Software.AGENT:
        agent = (
            f"python3 examples/metalyard_agent.py --central {shlex.quote(gateway)} --token {shlex.quote(token)} \\\n"
            "  --engine http://127.0.0.1:8000 --model MODEL"
        )
        note = _("An example of the contract, in 150 lines. An agent of yours takes the same address and credential.")
        return [Command(Platform.TERMINAL, PLATFORMS[Platform.TERMINAL], agent, note)]
    name = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())
    backend = next(choice.backend for choice in CHOICES if choice.software is software)
    options = {"--gateway": gateway, "--token": token}
    options |= {"--provider": provider} if provider != "local" else {}
    options |= {"--name": name} if name else {}
    options |= {"--backend": backend} if backend else {"--data": "muster-node"}
    clone = (
        _("In a folder with Muster's files; Python 3.11 or newer is all that it needs.")
        if IS_CHECKOUT
        else _("Where Muster is installed, with Python 3.11 or newer: pipx install 'muster[llamacpp]'.")
    )
    line = " ".join(f"{option} {shlex.quote(value)}" for option, value in options.items())
    commands = [Command(Platform.TERMINAL, PLATFORMS[Platform.TERMINAL], f"{COMMAND} node {line}", clone)]
    variables = {"MUSTER_GATEWAY": gateway, "MUSTER_TOKEN": token}
    names = {"--provider": "MUSTER_PROVIDER", "--name": "MUSTER_NAME", "--backend": "MUSTER_BACKEND_URL"}
    variables |= {names[option]: value for option, value in options.items() if option in names}
    commands.append(Command(Platform.SYSTEMD, PLATFORMS[Platform.SYSTEMD], _write_systemd(variables), clone))
    commands.append(Command(Platform.LAUNCHD, PLATFORMS[Platform.LAUNCHD], _write_launchd(variables), clone))
    image = _("With the image of docker/Dockerfile.runner, built as muster-runner.")
    commands.append(Command(Platform.DOCKER, PLATFORMS[Platform.DOCKER], _write_docker(variables), image))
    return commands


def _write_systemd(variables: dict[str, str]) -> str:
    # The token stands in a file of its own that only root reads, and not in the unit, which everybody may read.
    quoted = {name: value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") for name, value in variables.items()}
    lines = "\n".join(f'Environment="{name}={_keep(value)}"' for name, value in quoted.items() if name != "MUSTER_TOKEN")
    data = "" if "MUSTER_BACKEND_URL" in variables else "\nEnvironment=MUSTER_DATA=%S/muster-node\nStateDirectory=muster-node"
    return f"""sudo install -m 600 /dev/stdin /etc/muster-node.token <<'END'
{variables["MUSTER_TOKEN"]}
END
sudo tee /etc/systemd/system/muster-node.service >/dev/null <<END
[Unit]
Description=Muster node
After=network-online.target
Wants=network-online.target

[Service]
User=$(id -un)
WorkingDirectory=$PWD
LoadCredential=token:/etc/muster-node.token
Environment=MUSTER_TOKEN_FILE=%d/token
{lines}{data}
ExecStart={_PROGRAM} node
Restart=always
KillMode=mixed
TimeoutStopSec=45

[Install]
WantedBy=multi-user.target
END
sudo systemctl enable --now muster-node"""


def _write_launchd(variables: dict[str, str]) -> str:
    data = {} if "MUSTER_BACKEND_URL" in variables else {"MUSTER_DATA": "$HOME/muster-node"}
    values = {**{name: _keep(_escape(value)) for name, value in variables.items()}, **data}
    pairs = "\n".join(f"  <key>{name}</key><string>{value}</string>" for name, value in values.items())
    return f"""mkdir -p ~/Library/LaunchAgents
(umask 077; cat > ~/Library/LaunchAgents/muster.node.plist <<END
<?xml version="1.0" encoding="UTF-8"?>
<plist version="1.0"><dict>
 <key>Label</key><string>muster.node</string>
 <key>ProgramArguments</key><array><string>{_PROGRAM}</string><string>node</string></array>
 <key>WorkingDirectory</key><string>$PWD</string>
 <key>EnvironmentVariables</key><dict>
{pairs}
 </dict>
 <key>RunAtLoad</key><true/><key>KeepAlive</key><true/>
 <key>StandardErrorPath</key><string>$HOME/Library/Logs/muster-node.log</string>
</dict></plist>
END
)
launchctl bootstrap gui/$(id -u) ~/Library/LaunchAgents/muster.node.plist"""


def _write_docker(variables: dict[str, str]) -> str:
    # What listens on the machine itself is on another address within a container.
    inside = {
        name: value.replace("127.0.0.1", "host.docker.internal").replace("localhost", "host.docker.internal")
        for name, value in variables.items()
    }
    given = " ".join(f"-e {shlex.quote(f'{name}={value}')}" for name, value in inside.items())
    data = "" if "MUSTER_BACKEND_URL" in variables else " -v muster-node:/srv/data -e MUSTER_DATA=/srv/data --gpus all"
    return (
        "docker run -d --name muster-node --restart unless-stopped --init --add-host host.docker.internal:host-gateway \\\n"
        f"  {given}{data} \\\n  muster-runner"
    )


def _keep(text: str) -> str:
    """Return a value that a shell leaves alone in a here-document whose other words it expands."""
    return "".join(f"\\{letter}" if letter in "\\$`" else letter for letter in text)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def is_local(gateway: str) -> bool:
    """Whether an address of a gateway means the machine that reads it, so that another machine needs another one."""
    host = urlsplit(gateway).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


# What a node has reached


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a node with a credential is. ``models``: what it has loaded, or serves. ``words``: what it is to trust, if so.

    ``trouble``: what keeps it from answering, as a sentence; empty = nothing.
    """

    node_id: uuid.UUID
    name: str
    is_online: bool
    models: tuple[str, ...]
    is_governed: bool
    trusts: bool
    words: str
    trouble: str


def read_reached(credential_id: int) -> list[Reached]:
    """Return the nodes that have enrolled with a credential, the first first; three queries."""
    nodes = with_clock(Node.objects.filter(credential_id=credential_id).select_related("presence", "provider"))
    found, policy = list(nodes.order_by("created_at")[: limits().nodes.setup_nodes]), active_policy()
    words = ""
    if policy is not None:
        words = next((version.words for version in list_policy_versions() if version.version == 1), "")
    return [_judge(node, words) for node in found]


def _judge(node: Node, words: str) -> Reached:
    status = judge_status(node, now=clock.now())
    unreachable = explain_unreachable(node) if status is NodeStatus.OFFLINE else ""
    return Reached(
        node_id=node.pk,
        name=node.name,
        is_online=status not in {NodeStatus.OFFLINE, NodeStatus.ERROR},
        models=tuple(node.model_names),
        is_governed=bool(words) and node.op_level == "L2",
        trusts=node.policy_version > 0,
        words=words,
        trouble=unreachable,
    )


# Codes


def create_setup_code(*, name: str, provider_name: str, actor: str) -> tuple[SetupCode, str]:
    """Make a credential for one node, and a code that shows it once; return the code's text, which exists nowhere else.

    Raises BadRequest, ProviderNotFound.
    """
    with transaction.atomic():
        credential, _text = create_credential(name=name, provider_name=provider_name, actor=actor)
        text = "".join(secrets.choice(_ALPHABET) for _letter in range(10))
        now = clock.now()
        SetupCode.objects.filter(expires_at__lt=now).delete()
        expires_at = now + timedelta(seconds=limits().nodes.setup_code_s)
        code = SetupCode.objects.create(digest=_digest(text), credential=credential, expires_at=expires_at)
        record_event(actor=actor, action="setup_code.create", target=credential.name, detail={"keyid": credential.keyid})
    return code, f"{text[:5]}-{text[5:]}"


def use_setup_code(text: str) -> tuple[NodeCredential, str]:
    """Return the credential of a code and its text, once. Raises BadRequest for one that is wrong, used or too old."""
    now = clock.now()
    with transaction.atomic():
        code = (
            SetupCode.objects.select_for_update(of=("self",))
            .select_related("credential", "credential__provider")
            .filter(digest=_digest(text), used_at__isnull=True, expires_at__gt=now, credential__revoked_at__isnull=True)
            .first()
        )
        token = open_credential(code.credential) if code is not None else ""
        if code is None or not token:
            raise BadRequest(_("This code is wrong, was used, or is too old. Ask for another one."), param="code")
        code.used_at = now
        code.save(update_fields=["used_at"])
        record_event(
            actor="setup", action="setup_code.use", target=code.credential.name, detail={"keyid": code.credential.keyid}
        )
    return code.credential, token


def sign_progress(credential: NodeCredential) -> str:
    """Return what lets whoever used a code follow how far its node is, and nothing else."""
    return signing.dumps(credential.pk, salt=_SALT)


def read_progress(text: str) -> Sequence[Reached] | None:
    """Return how far the node is of whom ``sign_progress`` was for; None for anything else, or after ``setup_code_s``."""
    try:
        credential_id = signing.loads(text, salt=_SALT, max_age=limits().nodes.setup_code_s)
    except signing.BadSignature:
        return None
    return read_reached(int(credential_id))


def _digest(text: str) -> bytes:
    cleaned = "".join(letter for letter in text.upper() if letter.isalnum())
    return hashlib.sha256(f"{_SALT}:{cleaned}".encode()).digest()
