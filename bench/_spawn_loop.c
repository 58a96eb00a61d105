/* The floor of bench/commands.py: `_spawn_loop THREADS PROCESSES PROGRAM`. Each thread starts a program and waits for its end,
 * again and again, until all of them together have started PROCESSES. */
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>

extern char **environ;
static atomic_long left;
static char *program;

static void *loop(void *unused) {
    char *argv[] = {program, NULL};
    while (atomic_fetch_sub(&left, 1) > 0) {
        pid_t pid;
        int status;
        if (posix_spawn(&pid, program, NULL, NULL, argv, environ) != 0 || waitpid(pid, &status, 0) != pid || status != 0)
            exit(1);
    }
    return unused;
}

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    int threads = atoi(argv[1]);
    pthread_t started[threads];
    left = atol(argv[2]);
    program = argv[3];
    for (int i = 0; i < threads; i++)
        if (pthread_create(&started[i], NULL, loop, NULL) != 0)
            return 1;
    for (int i = 0; i < threads; i++)
        pthread_join(started[i], NULL);
    return 0;
}
