"""A process that appends audit events until it is killed. Prints a line for every one that was committed."""

from __future__ import annotations

import sys

import django


def main() -> None:
    django.setup()
    from django.db import transaction

    from governance.audit import record_event

    number = 0
    while True:
        number += 1
        with transaction.atomic():
            record_event(actor="system:test", action="test.append", target=str(number), detail={"n": number})
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
