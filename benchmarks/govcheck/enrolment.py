"""Registers key files and makes admin tokens in one process of the control plane: each command would load Django anew.

``python -m benchmarks.govcheck.enrolment``: reads ``{"people": {name: public line}, "tokens": n}``; writes the tokens of
nobody and those of the people: ``{"tokens": […], "of": {name: token}}``.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

import django

django.setup()

from core.models import User
from governance.admin_tokens import create_admin_token
from governance.keys import add_key_file

ACTOR = "system:govcheck"


def main() -> int:
    """Do it."""
    wanted = json.load(sys.stdin)
    own = {}
    for name, line in wanted["people"].items():
        person = User.objects.get(username=name)
        add_key_file(user=person, line=line, actor=ACTOR)
        own[name] = create_admin_token(name=f"of {name}", actor=ACTOR, owner=person)[1]
    tokens = [create_admin_token(name=f"asker {n}", actor=ACTOR)[1] for n in range(wanted["tokens"])]
    sys.stdout.write(json.dumps({"tokens": tokens, "of": own}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
