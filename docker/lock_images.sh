#!/bin/sh
# Write docker/.env: the release, and the images that are built on and run, each by the digest that its tag has in the registry
# now. Compose reads it. What else stands in the file stays. Needs docker with buildx, and the registry.
#
#   docker/lock_images.sh          what everybody needs
#   docker/lock_images.sh --cuda   also what Dockerfile.runner-cuda needs: CUDA's image, and the build of llama.cpp for it
set -eu
umask 077
cd "$(dirname "$0")"
touch .env
put() {
    { grep -v "^$1=" .env || true; printf '%s=%s\n' "$1" "$2"; } > .env.new
    mv .env.new .env
}
lock() {
    digest=$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$2")
    if ! printf '%s\n' "$digest" | grep -Eqx 'sha256:[0-9a-f]{64}'; then
        echo "lock_images: the registry named no digest for $2; docker/.env keeps the one before" >&2
        exit 1
    fi
    put "$1" "$2@$digest"
}
for pair in PYTHON_IMAGE=python:3.11-slim-bookworm POSTGRES_IMAGE=postgres:18-bookworm VALKEY_IMAGE=valkey/valkey:9 \
    CADDY_IMAGE=caddy:2 PROMETHEUS_IMAGE=prom/prometheus:latest GRAFANA_IMAGE=grafana/grafana:latest; do
    lock "${pair%%=*}" "${pair#*=}"
done
put MUSTER_VERSION "$(sed -n 's/^RELEASE = "\(.*\)"$/\1/p' ../wire/__init__.py)"
[ "${1:-}" = --cuda ] || exit 0
lock CUDA_IMAGE nvidia/cuda:12.9.1-cudnn-runtime-ubuntu24.04
pin=$(grep -Eo '^xllamacpp==[^ ;]+' ../requirements/cuda.txt)
hash=$(docker run --rm ubuntu:24.04 sh -ec "apt-get update -qq >&2 && apt-get install -yqq python3-pip >&2
pip download -q --no-deps --only-binary :all: --index-url https://xorbitsai.github.io/xllamacpp/whl/cu128 -d /w $pin >&2
sha256sum /w/*.whl | cut -d' ' -f1")
if ! printf '%s\n' "$hash" | grep -Eqx '[0-9a-f]{64}'; then
    echo "lock_images: $pin for CUDA could not be fetched; docker/.env keeps the one before" >&2
    exit 1
fi
put LLAMA_CUDA_REQUIREMENT "$pin --hash=sha256:$hash"
