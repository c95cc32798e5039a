"""A runner that is called over HTTP instead of dialling in, as the control plane sees it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone
from pytest_django import Settings

from core.limits import limits
from gateway.services import allow_model
from nodes.models import Node, NodePresence
from nodes.services import Registration, probe_direct_nodes, register_direct_node
from tests.fakes.limits import set_limits
from tests.fakes.nodes import ACTOR, make_credential
from tests.fakes.runners.process import run_api_box
from wire.contract import NodeStatus

pytestmark = pytest.mark.django_db


def test_a_real_runner_that_is_called_over_http_is_seen_with_what_it_has_loaded(tmp_path: Path, settings: Settings) -> None:
    settings.NODE_DIRECT_ALLOW_LOOPBACK = True
    set_limits(nodes={"probe_s": 30.0})
    allow_model(name="a", actor=ACTOR)
    credential, _ = make_credential()
    with run_api_box(tmp_path, models=("a", "b"), env={"MUSTER_API_KEY": "a-key-of-the-node"}) as box:
        box.client.headers["authorization"] = "Bearer a-key-of-the-node"
        about = Registration(node_name="agent", current_model="a", public_base_url=box.url, api_key="a-key-of-the-node")
        registered = register_direct_node(credential=credential, registration=about)
        assert (registered.status, registered.unreachable) == (NodeStatus.AVAILABLE, "")
        presence = NodePresence.objects.get()
        assert (presence.replicas, sorted(presence.available_models or [])) == ([], ["a", "b"])
        box.ensure_loaded("a")
        NodePresence.objects.update(probed_at=timezone.now() - timedelta(seconds=limits().nodes.probe_silent_s + 1))
        assert probe_direct_nodes() == 0
    node = Node.objects.select_related("presence").get()
    assert node.model_names == ["a"]
    assert "/v1/chat/completions" in (node.model_endpoints or {})["a"]
    (replica,) = node.presence.replicas
    assert (replica["model"], replica["state"], replica["engine"]) == ("a", "loaded", "llamacpp")
    assert replica["context_tokens"] > 0
    assert (node.presence.memory or {})["total_mb"] > 0
