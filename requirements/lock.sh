#!/bin/sh
# Recompile the hash-locked sets from pyproject.toml. Needs uv on PATH (pip install uv). Run after changing a dependency.
set -eu
cd "$(dirname "$0")/.."
export UV_CUSTOM_COMPILE_COMMAND="requirements/lock.sh"
compile() { uv pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links -q "$@"; }
compile --extra ct2 --extra whisper --extra server --extra otel --extra dev -o requirements/dev.txt
compile --extra llamacpp --extra ct2 --extra whisper --extra otel -c requirements/dev.txt -o requirements/engines.txt
compile --extra server --extra otel -c requirements/dev.txt -o requirements/server.txt
compile --extra llamacpp --extra otel -c requirements/dev.txt -o requirements/runner.txt
# For docker/Dockerfile.runner-cuda: its Ubuntu's Python, and vLLM, which pins another torch than ExLlamaV3, by itself.
cuda() { uv pip compile - --python-version 3.12 --python-platform x86_64-unknown-linux-gnu --generate-hashes --no-emit-index-url --no-emit-find-links -q "$@"; }
echo '.[llamacpp,ct2,whisper,otel,exllamav3]' | cuda --no-emit-package muster -c requirements/engines.txt -o requirements/cuda.txt
grep -o 'vllm==[0-9.]*' pyproject.toml | cuda -o requirements/vllm.txt
# What the launcher installs first, hash-locked as well, to install the rest quickly.
printf 'uv\n' | uv pip compile - --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links -q -o requirements/installer.txt
