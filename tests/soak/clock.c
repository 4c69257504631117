/* Preloaded into processes of the soak: their wall clock is off by the seconds that stand in the file $SOAK_CLOCK.
 * Monotonic clocks stay as they are. Deadlines of the wall clock are passed on as real ones. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const long *offset;
static int (*real_clock)(clockid_t, struct timespec *);
static int (*real_cond)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_sem)(sem_t *, const struct timespec *);

__attribute__((constructor)) static void start(void) {
    real_clock = dlsym(RTLD_NEXT, "clock_gettime");
    real_cond = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    real_sem = dlsym(RTLD_NEXT, "sem_timedwait");
    const char *path = getenv("SOAK_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return;
    void *page = mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    if (page != MAP_FAILED) offset = page;
    close(fd);
}

static long shift(void) { return offset ? *offset : 0; }

int clock_gettime(clockid_t id, struct timespec *now) {
    if (!real_clock) real_clock = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real_clock(id, now);
    if (!code && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec found;
    int code = clock_gettime(CLOCK_REALTIME, &found);
    (void)zone;
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return code;
}

time_t time(time_t *out) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (out) *out = found.tv_sec;
    return found.tv_sec;
}

/* A deadline after 2001 is one of the wall clock, an earlier one of the monotonic clock. */
static struct timespec real_deadline(const struct timespec *at) {
    struct timespec found = *at;
    if (found.tv_sec > 1000000000) found.tv_sec -= shift();
    return found;
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *at) {
    struct timespec found = real_deadline(at);
    return real_cond(cond, mutex, &found);
}

int sem_timedwait(sem_t *sem, const struct timespec *at) {
    struct timespec found = real_deadline(at);
    return real_sem(sem, &found);
}
