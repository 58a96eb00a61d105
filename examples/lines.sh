#!/bin/sh
# One job per line of a file, all of them waited for; then a look at one, and the same submit again, which runs nothing.
# No server is needed: an embedded one works on the data folder for as long as this goes on.
set -eu
words=$(mktemp)
trap 'rm -f "$words"' EXIT
printf '%s\n' Alice Bob 'Carol Danvers' > "$words"

tasuki submit --each-line "$words" --job-id greetings --wait echo Hello,
tasuki logs greetings.3                     # the job of line 3: a line is one argument, blanks and all
tasuki status greetings

tasuki submit --each-line "$words" --job-id greetings --wait echo Hello,      # the stored results; no second run
