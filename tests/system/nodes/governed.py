"""The names under which other tests import what tests/fakes/governed_nodes.py has."""

from tests.fakes.governed_nodes import Identity, approve_load, make_box, only_run

__all__ = ["Identity", "approve_load", "make_box", "only_run"]
