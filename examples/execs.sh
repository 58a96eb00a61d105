#!/bin/sh
# A worker that runs only what execs.toml allows: an input file in, an output file back, a refusal, and a job for another worker.
# Brings its own server (unix socket only) and leaves nothing behind.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
cd "$folder"
export TASUKI_DATA="$folder/data" TASUKI_URL="unix://$folder/data/socket"

tasuki server --no-tcp > server.log 2>&1 &
server=$!
until grep -q '^ready' server.log || ! kill -0 $server; do sleep 0.1; done
tasuki worker --config "$here/execs.toml" --subject 'text.>' > worker.log 2>&1 &
worker=$!
trap 'kill $worker && wait $worker; kill $server && wait $server; rm -rf "$folder"' EXIT

printf 'pear\napple\nfig\napple\n' > fruit.txt
tasuki run --subject text.count --file fruit.txt count -l
tasuki run --subject text.sort --file fruit.txt -o result.zip sort --unique
python3 -m zipfile -e result.zip result && cat result/out/sorted.txt

# This argument is not on the list: exit 125, and the reason on stderr.
tasuki run --subject text.count --file fruit.txt count --files0-from=/etc/passwd || echo "refused: exit $?"
# Nor is this program: its job is not given to this worker. It waits for one that offers it.
tasuki submit --subject text.any --job-id another rm -rf /
tasuki explain another
tasuki cancel another
