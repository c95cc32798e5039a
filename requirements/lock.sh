#!/bin/sh
# Recompile the three hash-locked sets from pyproject.toml. Needs uv on PATH (pip install uv). Run after changing a dependency.
set -eu
cd "$(dirname "$0")/.."
export UV_CUSTOM_COMPILE_COMMAND="requirements/lock.sh"
compile() { uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links -q "$@"; }
compile --all-extras -o requirements/dev.txt
compile --extra llamacpp --extra server --extra embedded -c requirements/dev.txt -o requirements/server.txt
compile --extra llamacpp -c requirements/dev.txt -o requirements/runner.txt
# What the launcher installs first, hash-locked as well, to install the rest quickly.
printf 'uv\n' | uv pip compile - --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links -q -o requirements/installer.txt
