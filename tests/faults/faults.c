/* Faults of the file operations under the folder FAULTS_UNDER. Loaded by LD_PRELOAD, so that the program under test is the one
 * that is shipped and has no switch for it.
 *
 * KILL_AT=n     the process is killed at the n-th point: before a write and in the middle of it, before and after a rename, a new
 *               folder, a sync, a cut, a removal.
 * FAIL_FROM=n   from the n-th on, every write, new folder and file opened to be written fails with the number FAIL_ERRNO. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_long passed;

static int under(const char *path) {
	const char *folder = getenv("FAULTS_UNDER");
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

static atomic_long written;

static int fails(void) {
	const char *from = getenv("FAIL_FROM");
	if (!from || atomic_fetch_add(&written, 1) + 1 < atol(from)) return 0;
	errno = atoi(getenv("FAIL_ERRNO"));
	return 1;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *bytes, size_t count) {
	REAL(write);
	if (under_fd(fd)) {
		if (fails()) return -1;
		point();
		if (due()) {
			if (real(fd, bytes, count / 2) >= 0) kill(getpid(), SIGKILL);
		}
	}
	return real(fd, bytes, count);
}

int open64(const char *path, int flags, ...) {
	REAL(open64);
	va_list arguments;
	va_start(arguments, flags);
	mode_t mode = flags & O_CREAT ? va_arg(arguments, mode_t) : 0;
	va_end(arguments);
	if ((flags & O_ACCMODE) != O_RDONLY && under(path) && fails()) return -1;
	return real(path, flags, mode);
}

int mkdir(const char *path, mode_t mode) {
	REAL(mkdir);
	if (!under(path)) return real(path, mode);
	if (fails()) return -1;
	point();
	int result = real(path, mode);
	point();
	return result;
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
AROUND(int, unlink, (const char *path), (path), under(path))
AROUND(int, rmdir, (const char *path), (path), under(path))
AROUND(int, fsync, (int fd), (fd), under_fd(fd))
AROUND(int, fdatasync, (int fd), (fd), under_fd(fd))
AROUND(int, ftruncate64, (int fd, off64_t length), (fd, length), under_fd(fd))
