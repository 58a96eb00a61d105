# A command of these tests: `sh step.sh LEDGER WORD…`. Adds its line to the ledger as jobs.py does, then:
#     hold FILE       waits until the file exists
#     spin SECONDS    computes
#     family FILE     starts a child that outlives TERM, writes both process numbers to the file, and ignores TERM itself
#     stubborn FILE   ignores TERM, and writes the time to the file as long as it lives
ledger=$1
shift
echo "$TASUKI_JOB_ID $TASUKI_ATTEMPT $$ $(date +%s.%N)" >> "$ledger"
case $1 in
hold)
    while [ ! -e "$2" ]; do sleep 0.02; done
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
    sh -c 'trap "" TERM; while :; do sleep 0.1; done' &
    echo "$$ $!" > "$2.new"
    mv "$2.new" "$2"
    while :; do sleep 0.1; done
    ;;
stubborn)
    trap '' TERM
    while :; do
        date +%s.%N > "$2.$TASUKI_ATTEMPT"
        sleep 0.05
    done
    ;;
esac
echo "attempt $TASUKI_ATTEMPT"
