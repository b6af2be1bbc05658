/* A clock that is set: time() and its like are ahead by the seconds (a double) in the file
   $CLOCK_AHEAD, at each call. For LD_PRELOAD; tests/support/clocks.py compiles it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile double *ahead;
__attribute__((constructor)) static void init(void) {
  const char *path = getenv("CLOCK_AHEAD");
  int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (fd < 0) return;
  void *p = mmap(0, sizeof(double), PROT_READ, MAP_SHARED, fd, 0);
  if (p != MAP_FAILED) ahead = p;
  close(fd);
}
int clock_gettime(clockid_t clock, struct timespec *t) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, t);
  if (!code && ahead && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    t->tv_sec += (time_t)*ahead;
  return code;
}
int gettimeofday(struct timeval *restrict t, void *restrict zone) {
  (void)zone;
  struct timespec now;
  int code = clock_gettime(CLOCK_REALTIME, &now);
  t->tv_sec = now.tv_sec;
  t->tv_usec = now.tv_nsec / 1000;
  return code;
}
time_t time(time_t *t) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (t) *t = now.tv_sec;
  return now.tv_sec;
}
