#!/bin/sh
# Recompile the hash-locked sets from pyproject.toml. Needs uv on PATH (pip install uv). Run after changing a dependency.
set -eu
cd "$(dirname "$0")/.."
export UV_CUSTOM_COMPILE_COMMAND="requirements/lock.sh"
compile() { uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links -q "$@"; }
# Not among them: vllm and exllamav3, which pin a CUDA torch and live in an environment of their own.
compile --extra ct2 --extra whisper --extra server --extra otel --extra dev -o requirements/dev.txt
compile --extra llamacpp --extra ct2 --extra whisper --extra otel -c requirements/dev.txt -o requirements/engines.txt
compile --extra server --extra otel -c requirements/dev.txt -o requirements/server.txt
compile --extra llamacpp --extra otel -c requirements/dev.txt -o requirements/runner.txt
# What the launcher installs first, hash-locked as well, to install the rest quickly.
printf 'uv\n' | uv pip compile - --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links -q -o requirements/installer.txt
