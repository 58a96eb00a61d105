# A job of http_worker.py for a worker on the queue: `sh app_job.sh LEDGER`, with the payload on stdin.
# `linger` is a job like any other here: such a worker renews its leases.
ledger=$1
payload=$(cat)
echo "$TASUKI_JOB_ID $TASUKI_ATTEMPT $$ $(date +%s.%N)" >> "$ledger"
case $payload in
*'"die"'*)
    # The keeper's parent is the worker; nobody else is killed, should the worker be gone already.
    worker=$(awk '/^PPid:/ { print $2 }' "/proc/$PPID/status")
    grep -q queue-worker "/proc/$worker/cmdline" && kill -KILL "$worker"
    sleep 10
    exit 1
    ;;
*'"fail"'*) exit 1 ;;
*'"stumble"'*) [ "$TASUKI_ATTEMPT" = 1 ] && exit 1 ;;
esac
echo "{\"attempt\": $TASUKI_ATTEMPT, \"pid\": $$}"
