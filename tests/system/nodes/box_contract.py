"""The name under which another test imports what tests/fakes/direct_node.py has."""

from tests.fakes.direct_node import run_direct_node as run_box_contract

__all__ = ["run_box_contract"]
