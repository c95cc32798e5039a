#!/usr/bin/env python3
"""Django's command line, where its tools look for it."""

from __future__ import annotations

from controlplane.manage import main

if __name__ == "__main__":
    main()
