#!/bin/sh
# A Python function as an exec: the worker keeps an interpreter with the module imported, and forks it for each job.
# Brings its own server (unix socket only) and leaves nothing behind.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
cd "$folder"
export TASUKI_DATA="$folder/data" TASUKI_URL="unix://$folder/data/socket"

cat > execs.toml <<END
[exec.price]
kind = "python"
call = "prices:main"                    # prices.py beside this script; main(arguments)
args = ["[a-z]{2}", "[0-9.]+"]          # what a job may pass; the module and the function are fixed here
env = { PYTHONPATH = "$here" }
timeout_s = 10
END

tasuki server --no-tcp > server.log 2>&1 &
server=$!
tasuki worker --config execs.toml --subject 'shop.>' > worker.log 2>&1 &
worker=$!
trap 'kill $worker && wait $worker; kill $server && wait $server; rm -rf "$folder"' EXIT

tasuki run --subject shop.price price de 100 9.99
tasuki run --subject shop.price price jp 1250
tasuki run --subject shop.price price xx 1 || echo "exit $?"
