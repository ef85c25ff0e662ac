/* Kills the process at its KILL_AT-th point among the file operations under the folder KILL_UNDER: before a write and in
 * the middle of it, before and after a rename, a new folder, a sync, a cut, a removal. Loaded by LD_PRELOAD, so that the
 * program under test is the one that is shipped and has no switch for it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_long passed;

static int under(const char *path) {
	const char *folder = getenv("KILL_UNDER");
	return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}

static int under_fd(int fd) {
	char link[32], path[4096];
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	ssize_t length = readlink(link, path, sizeof path - 1);
	if (length < 0) return 0;
	path[length] = 0;
	return under(path);
}

static int due(void) {
	const char *at = getenv("KILL_AT");
	return at && atomic_fetch_add(&passed, 1) + 1 == atol(at);
}

static void point(void) {
	if (due()) kill(getpid(), SIGKILL);
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *bytes, size_t count) {
	REAL(write);
	if (under_fd(fd)) {
		point();
		if (due()) {
			if (real(fd, bytes, count / 2) >= 0) kill(getpid(), SIGKILL);
		}
	}
	return real(fd, bytes, count);
}

#define AROUND(type, name, parameters, arguments, counts) \
	type name parameters { \
		REAL(name); \
		int counted = counts; \
		if (counted) point(); \
		type result = real arguments; \
		if (counted) point(); \
		return result; \
	}

AROUND(int, rename, (const char *from, const char *to), (from, to), under(to))
AROUND(int, mkdir, (const char *path, mode_t mode), (path, mode), under(path))
AROUND(int, unlink, (const char *path), (path), under(path))
AROUND(int, fsync, (int fd), (fd), under_fd(fd))
AROUND(int, fdatasync, (int fd), (fd), under_fd(fd))
AROUND(int, ftruncate64, (int fd, off64_t length), (fd, length), under_fd(fd))
