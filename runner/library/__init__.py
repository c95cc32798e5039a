"""Model files on this machine: their ids, where they lie, what is there, and fetching them from a Hugging Face hub."""
