"""A child of the runner that says one word and then nothing, until its standard input closes."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    print('{"stage": "thinking"}', flush=True)
    sys.stdin.read()
