"""The names under which other tests import what tests/fakes/nodes.py has."""

from tests.fakes.nodes import ACTOR, audited, make_credential, make_node, make_presence, make_provider

__all__ = ["ACTOR", "audited", "make_credential", "make_node", "make_presence", "make_provider"]
