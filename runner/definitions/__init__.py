"""Models as the owner of the box describes them, and the values that loading them is made of. No I/O but reading settings."""
