#!/bin/sh
# Write fresh random secrets for compose.yaml into docker/secrets/. Never overwrites one.
# The folder is yours alone; the files inside are readable, because containers read them as other users.
set -eu
umask 022
here="$(cd "$(dirname "$0")" && pwd)"
mkdir -p "$here/secrets"
chmod 700 "$here/secrets"
cd "$here/secrets"
random() { od -An -N 32 -tx1 /dev/urandom | tr -d ' \n'; }
# printf is a builtin: no secret shows up in a process list.
write() { [ -e "$1" ] || { printf '%s\n' "$2" > "$1"; echo "wrote docker/secrets/$1"; }; }

write postgres_password "$(random)"
write secret_key "$(random)"
write database_password "$(random)"
write database_url "postgresql://muster:$(cat database_password)@postgres:5432/muster"
write redis_password "$(random)"
write redis_url "redis://:$(cat redis_password)@valkey:6379/0"
write valkey.conf "bind * -::*
save \"\"
appendonly no
maxmemory 256mb
maxmemory-policy noeviction
proto-max-bulk-len 1mb
requirepass $(cat redis_password)"
# Signs checkpoints of the audit log: 32 bytes in base64url.
write log_key "$(base64 < /dev/urandom | tr -d '\n+/=' | head -c 42)A"
# The servers take it from nodes, and the nodes of compose.yaml show it.
write node_token "$(random)"
write grafana_password "$(random)"
# Filled in once the installation can issue an admin token: see docs/operate.md, "Containers".
[ -e metrics_token ] || { : > metrics_token; echo "wrote docker/secrets/metrics_token (empty)"; }
