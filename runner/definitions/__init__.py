"""Models as the owner of the node describes them, and what loading them is made of. No I/O but reading settings."""
