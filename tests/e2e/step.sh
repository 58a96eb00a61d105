# A command of these tests: `sh step.sh LEDGER WORD…`. Adds its line to the ledger as jobs.py does, then:
#     hold FILE       waits until the file exists
#     spin SECONDS    computes
#     family FILE     starts a child, both ignore TERM; writes the two process numbers to the file
#     stubborn FILE   ignores TERM, and writes the time to FILE.<attempt> until FILE.end exists
# No loop outlives a test for long: whoever is forgotten ends after a minute.
ledger=$1
shift
echo "$TASUKI_JOB_ID $TASUKI_ATTEMPT $$ $(date +%s.%N)" >> "$ledger"
last=$(($(date +%s) + 60))
in_time() { [ "$(date +%s)" -lt $last ]; }
case $1 in
hold)
    while [ ! -e "$2" ] && in_time; do sleep 0.02; done
    ;;
spin)
    end=$(($(date +%s) + $2))
    while [ "$(date +%s)" -lt "$end" ]; do
        count=0
        while [ $count -lt 20000 ]; do count=$((count + 1)); done
    done
    ;;
family)
    trap '' TERM
    (while in_time; do sleep 0.1; done) &
    echo "$$ $!" > "$2.new"
    mv "$2.new" "$2"
    while in_time; do sleep 0.1; done
    ;;
stubborn)
    trap '' TERM
    while [ ! -e "$2.end" ] && in_time; do
        date +%s.%N > "$2.new"
        mv "$2.new" "$2.$TASUKI_ATTEMPT"
        sleep 0.05
    done
    ;;
esac
echo "attempt $TASUKI_ATTEMPT"
