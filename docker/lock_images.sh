#!/bin/sh
# Write docker/.env: the images that are built on and run, each by the digest that its tag has in the registry now.
# Compose reads it. What else stands in the file stays. Needs docker with buildx, and the registry.
set -eu
umask 077
cd "$(dirname "$0")"
touch .env
for pair in PYTHON_IMAGE=python:3.11-slim-bookworm POSTGRES_IMAGE=postgres:18-bookworm VALKEY_IMAGE=valkey/valkey:9; do
    name=${pair%%=*} tag=${pair#*=}
    digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$tag")
    if ! printf '%s\n' "$digest" | grep -Eqx 'sha256:[0-9a-f]{64}'; then
        echo "lock_images: the registry named no digest for $tag; docker/.env keeps the one before" >&2
        exit 1
    fi
    { grep -v "^$name=" .env || true; echo "$name=$tag@$digest"; } > .env.new
    mv .env.new .env
done
