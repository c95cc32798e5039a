"""Model files on this machine: their ids, where they lie, what is there, and fetching them from a Hugging Face hub."""

from runner.library.files import FoundModel
from runner.library.hub import Hub, allow_listed
from runner.library.ids import check_model_id
from runner.library.library import Library
from runner.library.quantizations import other_quantizations

__all__ = ["FoundModel", "Hub", "Library", "allow_listed", "check_model_id", "other_quantizations"]
