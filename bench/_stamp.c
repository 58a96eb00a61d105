/* Writes when its first instruction ran: nanoseconds of the clock that time.time_ns() reads. */
#include <stdio.h>
#include <time.h>

int main(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return printf("%lld%09ld\n", (long long)now.tv_sec, now.tv_nsec) < 0;
}
