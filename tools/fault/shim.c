/* Fault injection below everything: counts the file operations of one process under one directory and makes the Nth fail.

   Preloaded (LD_PRELOAD), it sees Python and TensorStore alike. It does nothing until fault_arm() is called, then every
   mutating libc call under the root is one numbered operation, executed and logged under one lock, so that the log is
   the true order. At the chosen operation it kills the process (before, after, or in the middle of a write), returns an
   errno once or for ever, or writes less than asked. It knows no policy: the driver picks the points. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN, WRITE, FSYNC, RENAME, UNLINK, MKDIR, RMDIR, TRUNCATE, LINK, SYMLINK, COPY };
enum { COUNT_ONLY, KILL_BEFORE, KILL_AFTER, FAIL_ONCE, FAIL_ALWAYS, TORN_KILL, SHORT_WRITE };
enum { DONE, KILLED_BEFORE, KILLED_AFTER, FAILED, TORN, SHORTENED };

/* One record of the log, followed by both paths and, for writes, by the bytes (see driver.py). */
struct record {
    uint32_t op, flag, error, created, truncated, path, path2, pad;
    int64_t offset, asked, done, data;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    pid_t pid;
    char root[PATH_MAX], pattern[PATH_MAX];
    size_t root_length;
    int mode, error, log, with_data;
    unsigned ops;
    long at, seen;
    double part;
} armed;

#define REAL(type, name, ...)                                             \
    static type (*real)(__VA_ARGS__);                                     \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

int fault_arm(const char *root, int mode, long at, int error, double part, unsigned ops, const char *pattern, int log, int with_data) {
    pthread_mutex_lock(&lock);
    snprintf(armed.root, sizeof armed.root, "%s", root);
    snprintf(armed.pattern, sizeof armed.pattern, "%s", pattern);
    armed.root_length = strlen(root);
    armed.mode = mode, armed.at = at, armed.error = error, armed.part = part, armed.ops = ops;
    armed.log = log, armed.with_data = with_data, armed.seen = 0;
    armed.pid = getpid();
    pthread_mutex_unlock(&lock);
    return 0;
}

long fault_disarm(void) {
    pthread_mutex_lock(&lock);
    armed.pid = 0;
    pthread_mutex_unlock(&lock);
    return armed.seen;
}

static int active(void) { return armed.pid && armed.pid == getpid(); }

static int below_root(const char *path) {
    size_t n = armed.root_length;
    return !strncmp(path, armed.root, n) && (path[n] == '/' || path[n] == 0);
}

static int path_of_fd(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, out, PATH_MAX - 1);
    if (n < 0) return 0;
    out[n] = 0;
    return 1;
}

static int path_at(int dir, const char *name, char *out) {
    char base[PATH_MAX];
    if (!name) return 0;
    if (name[0] == '/') return snprintf(out, PATH_MAX, "%s", name) > 0;
    if (dir == AT_FDCWD ? !getcwd(base, sizeof base) : !path_of_fd(dir, base)) return 0;
    return snprintf(out, PATH_MAX, "%s/%s", base, name) > 0;
}

static const char *relative(const char *path) {
    const char *rest = path + armed.root_length;
    return *rest == '/' ? rest + 1 : ".";
}

static void put(const void *data, size_t size) {
    const char *at = data;
    while (size) {
        ssize_t n = syscall(SYS_write, armed.log, at, size);
        if (n <= 0) return;
        at += n, size -= (size_t)n;
    }
}

static void put_record(struct record *r, const char *path, const char *path2, const struct iovec *data, int pieces) {
    if (armed.log < 0) return;
    r->path = (uint32_t)strlen(path), r->path2 = path2 ? (uint32_t)strlen(path2) : 0;
    int64_t bytes = r->op == SYMLINK && r->done == 0 ? r->asked : r->done;
    r->data = armed.with_data && data && bytes > 0 ? bytes : 0;
    put(r, sizeof *r), put(path, r->path);
    if (path2) put(path2, r->path2);
    int64_t left = r->data;
    for (int i = 0; i < pieces && left > 0; i++) {
        int64_t n = (int64_t)data[i].iov_len < left ? (int64_t)data[i].iov_len : left;
        put(data[i].iov_base, (size_t)n), left -= n;
    }
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

/* Is this operation the chosen one? Called with the lock held; numbers only what the filter lets through. */
static int chosen(unsigned op, const char *path, const char *path2) {
    if (!(armed.ops & (1u << op))) return 0;
    if (armed.pattern[0] && fnmatch(armed.pattern, relative(path), FNM_EXTMATCH) && (!path2 || fnmatch(armed.pattern, relative(path2), FNM_EXTMATCH)))
        return 0;
    armed.seen++;
    return armed.mode == FAIL_ALWAYS ? armed.seen >= armed.at : armed.seen == armed.at;
}

/* Runs one operation: CALL is the real call; R is its record; BYTES its data (writes). */
#define RUN(op_, path_, path2_, asked_, offset_, pieces_, count_, call_)                                             \
    do {                                                                                                             \
        struct record r = {.op = op_, .offset = offset_, .asked = asked_, .created = created, .truncated = truncated}; \
        int hit = chosen(op_, path_, path2_);                                                                        \
        if (hit && armed.mode == KILL_BEFORE) {                                                                      \
            r.flag = KILLED_BEFORE, put_record(&r, path_, path2_, 0, 0), die();                                      \
        }                                                                                                            \
        if (hit && (armed.mode == FAIL_ONCE || armed.mode == FAIL_ALWAYS)) {                                         \
            r.flag = FAILED, r.error = (uint32_t)armed.error, put_record(&r, path_, path2_, 0, 0);                   \
            pthread_mutex_unlock(&lock);                                                                             \
            errno = armed.error;                                                                                     \
            return -1;                                                                                               \
        }                                                                                                            \
        result = call_;                                                                                              \
        int saved = errno;                                                                                           \
        r.done = result, r.error = result < 0 ? (uint32_t)saved : 0;                                                 \
        if (hit && armed.mode == KILL_AFTER) {                                                                       \
            r.flag = KILLED_AFTER, put_record(&r, path_, path2_, pieces_, count_), die();                            \
        }                                                                                                            \
        put_record(&r, path_, path2_, pieces_, count_);                                                              \
        pthread_mutex_unlock(&lock);                                                                                 \
        errno = saved;                                                                                               \
        return result;                                                                                               \
    } while (0)

#define PLAIN(op_, path_, path2_, call_)                                 \
    do {                                                                 \
        unsigned created = 0, truncated = 0;                             \
        int result;                                                      \
        pthread_mutex_lock(&lock);                                       \
        RUN(op_, path_, path2_, 0, 0, (struct iovec *)0, 0, call_);      \
    } while (0)

/* ---- open ---- */

typedef int (*open_at)(int, const char *, int, mode_t);

static int run_open(open_at call, int dir, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    int writes = (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC));
    if (!active() || !writes || (flags & O_TMPFILE) == O_TMPFILE || !path_at(dir, name, path) || !below_root(path))
        return call(dir, name, flags, mode);
    struct stat info;
    pthread_mutex_lock(&lock);
    int there = fstatat(AT_FDCWD, path, &info, AT_SYMLINK_NOFOLLOW) == 0, result;
    unsigned created = !there && (flags & O_CREAT), truncated = there && (flags & O_TRUNC) && info.st_size > 0;
    RUN(OPEN, path, (char *)0, 0, 0, (struct iovec *)0, 0, call(dir, name, flags, mode));
}

static int real_openat(int dir, const char *name, int flags, mode_t mode) {
    REAL(int, "openat", int, const char *, int, ...);
    return real(dir, name, flags, mode);
}

#define MODE_ARGUMENT                                \
    mode_t mode = 0;                                 \
    if (flags & (O_CREAT | O_TMPFILE)) {             \
        va_list list;                                \
        va_start(list, flags);                       \
        mode = (mode_t)va_arg(list, unsigned);       \
        va_end(list);                                \
    }

int open(const char *name, int flags, ...) { MODE_ARGUMENT return run_open(real_openat, AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE_ARGUMENT return run_open(real_openat, AT_FDCWD, name, flags, mode); }
int openat(int dir, const char *name, int flags, ...) { MODE_ARGUMENT return run_open(real_openat, dir, name, flags, mode); }
int openat64(int dir, const char *name, int flags, ...) { MODE_ARGUMENT return run_open(real_openat, dir, name, flags, mode); }
int __open_2(const char *name, int flags) { return run_open(real_openat, AT_FDCWD, name, flags, 0); }
int __open64_2(const char *name, int flags) { return run_open(real_openat, AT_FDCWD, name, flags, 0); }
int __openat_2(int dir, const char *name, int flags) { return run_open(real_openat, dir, name, flags, 0); }
int __openat64_2(int dir, const char *name, int flags) { return run_open(real_openat, dir, name, flags, 0); }
int creat(const char *name, mode_t mode) { return run_open(real_openat, AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return creat(name, mode); }

static FILE *run_fopen(const char *name, const char *mode, FILE *(*call)(const char *, const char *)) {
    if (!active() || !strpbrk(mode, "wa+")) return call(name, mode);
    int flags = strchr(mode, '+') ? O_RDWR : O_WRONLY;
    if (mode[0] == 'w') flags |= O_CREAT | O_TRUNC;
    if (mode[0] == 'a') flags |= O_CREAT | O_APPEND;
    int fd = run_open(real_openat, AT_FDCWD, name, flags | O_CLOEXEC, 0666);
    return fd < 0 ? 0 : fdopen(fd, mode);
}

FILE *fopen(const char *name, const char *mode) {
    REAL(FILE *, "fopen", const char *, const char *);
    return run_fopen(name, mode, real);
}
FILE *fopen64(const char *name, const char *mode) {
    REAL(FILE *, "fopen64", const char *, const char *);
    return run_fopen(name, mode, real);
}

/* ---- write ---- */

typedef ssize_t (*write_call)(int, const struct iovec *, int, off_t);

static ssize_t run_write(write_call call, int fd, const struct iovec *pieces, int count, off_t offset) {
    char path[PATH_MAX];
    if (!active() || !path_of_fd(fd, path) || !below_root(path)) return call(fd, pieces, count, offset);
    unsigned created = 0, truncated = 0;
    int64_t asked = 0, at = offset;
    ssize_t result;
    for (int i = 0; i < count; i++) asked += (int64_t)pieces[i].iov_len;
    pthread_mutex_lock(&lock);
    if (offset < 0) {
        struct stat info;
        at = fcntl(fd, F_GETFL) & O_APPEND ? (fstat(fd, &info) ? 0 : info.st_size) : lseek(fd, 0, SEEK_CUR);
    }
    if ((armed.mode == TORN_KILL || armed.mode == SHORT_WRITE) && count && chosen(WRITE, path, 0)) {
        int64_t keep = armed.part < 0 ? asked - 1 : (int64_t)((double)asked * armed.part);
        int torn = armed.mode == TORN_KILL;
        if (!torn && keep < 1) keep = asked < 1 ? asked : 1;
        char whole[1 << 16];
        int64_t filled = 0;
        for (int i = 0; i < count && filled < keep && filled < (int64_t)sizeof whole; i++) {
            int64_t n = (int64_t)pieces[i].iov_len;
            if (n > keep - filled) n = keep - filled;
            if (n > (int64_t)sizeof whole - filled) n = (int64_t)sizeof whole - filled;
            memcpy(whole + filled, pieces[i].iov_base, (size_t)n), filled += n;
        }
        struct iovec part = {whole, (size_t)filled};
        ssize_t done = filled ? call(fd, &part, 1, offset) : 0;
        struct record r = {.op = WRITE, .flag = torn ? TORN : SHORTENED, .offset = at, .asked = asked, .done = done};
        put_record(&r, path, 0, &part, 1);
        if (torn) die();
        pthread_mutex_unlock(&lock);
        return done;
    }
    if (armed.mode == TORN_KILL || armed.mode == SHORT_WRITE) { /* counted above, or not a candidate */
        result = call(fd, pieces, count, offset);
        int saved = errno;
        struct record r = {.op = WRITE, .offset = at, .asked = asked, .done = result};
        put_record(&r, path, 0, pieces, count);
        pthread_mutex_unlock(&lock);
        errno = saved;
        return result;
    }
    RUN(WRITE, path, (char *)0, asked, at, pieces, count, call(fd, pieces, count, offset));
}

static ssize_t real_write(int fd, const struct iovec *pieces, int count, off_t offset) {
    REAL(ssize_t, "write", int, const void *, size_t);
    (void)count, (void)offset;
    return real(fd, pieces[0].iov_base, pieces[0].iov_len);
}
static ssize_t real_pwrite(int fd, const struct iovec *pieces, int count, off_t offset) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off_t);
    (void)count;
    return real(fd, pieces[0].iov_base, pieces[0].iov_len, offset);
}
static ssize_t real_writev(int fd, const struct iovec *pieces, int count, off_t offset) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    (void)offset;
    return real(fd, pieces, count);
}
static ssize_t real_pwritev(int fd, const struct iovec *pieces, int count, off_t offset) {
    REAL(ssize_t, "pwritev64", int, const struct iovec *, int, off_t);
    return real(fd, pieces, count, offset);
}

ssize_t write(int fd, const void *data, size_t size) {
    struct iovec one = {(void *)data, size};
    return run_write(real_write, fd, &one, 1, -1);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    struct iovec one = {(void *)data, size};
    return run_write(real_pwrite, fd, &one, 1, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { return pwrite(fd, data, size, offset); }
ssize_t writev(int fd, const struct iovec *pieces, int count) { return run_write(real_writev, fd, pieces, count, -1); }
ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t offset) {
    return run_write(real_pwritev, fd, pieces, count, offset);
}
ssize_t pwritev64(int fd, const struct iovec *pieces, int count, off_t offset) { return pwritev(fd, pieces, count, offset); }

/* With flags (RWF_*) the call is refused while armed, as a kernel without them would do. */
ssize_t pwritev2(int fd, const struct iovec *pieces, int count, off_t offset, int flags) {
    if (flags && active()) {
        errno = EOPNOTSUPP;
        return -1;
    }
    REAL(ssize_t, "pwritev2", int, const struct iovec *, int, off_t, int);
    if (!active()) return real(fd, pieces, count, offset, flags);
    return offset < 0 ? writev(fd, pieces, count) : pwritev(fd, pieces, count, offset);
}
ssize_t pwritev64v2(int fd, const struct iovec *pieces, int count, off_t offset, int flags) {
    return pwritev2(fd, pieces, count, offset, flags);
}

/* Copies inside the kernel: counted and failed like writes; the power-loss model refuses a log that holds one. */

static int copies(int fd, char *path) { return active() && path_of_fd(fd, path) && below_root(path); }

ssize_t sendfile(int out, int in, off_t *offset, size_t size) {
    REAL(ssize_t, "sendfile", int, int, off_t *, size_t);
    char path[PATH_MAX];
    if (!copies(out, path)) return real(out, in, offset, size);
    unsigned created = 0, truncated = 0;
    ssize_t result;
    pthread_mutex_lock(&lock);
    RUN(COPY, path, (char *)0, (int64_t)size, 0, (struct iovec *)0, 0, real(out, in, offset, size));
}
ssize_t sendfile64(int out, int in, off_t *offset, size_t size) { return sendfile(out, in, offset, size); }
ssize_t copy_file_range(int in, off_t *from, int out, off_t *to, size_t size, unsigned flags) {
    REAL(ssize_t, "copy_file_range", int, off_t *, int, off_t *, size_t, unsigned);
    char path[PATH_MAX];
    if (!copies(out, path)) return real(in, from, out, to, size, flags);
    unsigned created = 0, truncated = 0;
    ssize_t result;
    pthread_mutex_lock(&lock);
    RUN(COPY, path, (char *)0, (int64_t)size, 0, (struct iovec *)0, 0, real(in, from, out, to, size, flags));
}

/* ---- sync, truncate ---- */

static int run_fd(unsigned op, int (*call)(int, off_t), int fd, off_t size) {
    char path[PATH_MAX];
    if (!active() || !path_of_fd(fd, path) || !below_root(path)) return call(fd, size);
    unsigned created = 0, truncated = 0;
    int result;
    pthread_mutex_lock(&lock);
    RUN(op, path, (char *)0, 0, size, (struct iovec *)0, 0, call(fd, size));
}
static int real_fsync(int fd, off_t unused) {
    REAL(int, "fsync", int);
    (void)unused;
    return real(fd);
}
static int real_fdatasync(int fd, off_t unused) {
    REAL(int, "fdatasync", int);
    (void)unused;
    return real(fd);
}
static int real_ftruncate(int fd, off_t size) {
    REAL(int, "ftruncate64", int, off_t);
    return real(fd, size);
}
static int real_truncate(const char *name, off_t size) {
    REAL(int, "truncate64", const char *, off_t);
    return real(name, size);
}
int fsync(int fd) { return run_fd(FSYNC, real_fsync, fd, 0); }
int fdatasync(int fd) { return run_fd(FSYNC, real_fdatasync, fd, 0); }
int ftruncate(int fd, off_t size) { return run_fd(TRUNCATE, real_ftruncate, fd, size); }
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int truncate(const char *name, off_t size) {
    char path[PATH_MAX];
    if (!active() || !path_at(AT_FDCWD, name, path) || !below_root(path)) return real_truncate(name, size);
    unsigned created = 0, truncated = 0;
    int result;
    pthread_mutex_lock(&lock);
    RUN(TRUNCATE, path, (char *)0, 0, size, (struct iovec *)0, 0, real_truncate(name, size));
}
int truncate64(const char *name, off_t size) { return truncate(name, size); }

/* ---- names ---- */

static int run_rename(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    REAL(int, "renameat2", int, const char *, int, const char *, unsigned);
    char path[PATH_MAX], path2[PATH_MAX];
    if (!active() || !path_at(from_dir, from, path) || !path_at(to_dir, to, path2) || !below_root(path) || !below_root(path2))
        return real(from_dir, from, to_dir, to, flags);
    PLAIN(RENAME, path, path2, real(from_dir, from, to_dir, to, flags));
}
int rename(const char *from, const char *to) { return run_rename(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int from_dir, const char *from, int to_dir, const char *to) { return run_rename(from_dir, from, to_dir, to, 0); }
int renameat2(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    return run_rename(from_dir, from, to_dir, to, flags);
}

static int run_unlink(int dir, const char *name, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    char path[PATH_MAX];
    if (!active() || !path_at(dir, name, path) || !below_root(path)) return real(dir, name, flags);
    PLAIN((flags & AT_REMOVEDIR) ? RMDIR : UNLINK, path, (char *)0, real(dir, name, flags));
}
int unlink(const char *name) { return run_unlink(AT_FDCWD, name, 0); }
int unlinkat(int dir, const char *name, int flags) { return run_unlink(dir, name, flags); }
int rmdir(const char *name) { return run_unlink(AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char *name) {
    int result = run_unlink(AT_FDCWD, name, 0);
    return result && (errno == EISDIR || errno == EPERM) ? run_unlink(AT_FDCWD, name, AT_REMOVEDIR) : result;
}

static int run_mkdir(int dir, const char *name, mode_t mode) {
    REAL(int, "mkdirat", int, const char *, mode_t);
    char path[PATH_MAX];
    if (!active() || !path_at(dir, name, path) || !below_root(path)) return real(dir, name, mode);
    PLAIN(MKDIR, path, (char *)0, real(dir, name, mode));
}
int mkdir(const char *name, mode_t mode) { return run_mkdir(AT_FDCWD, name, mode); }
int mkdirat(int dir, const char *name, mode_t mode) { return run_mkdir(dir, name, mode); }

static int run_link(int from_dir, const char *from, int to_dir, const char *to, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    char path[PATH_MAX], path2[PATH_MAX];
    if (!active() || !path_at(from_dir, from, path) || !path_at(to_dir, to, path2) || !below_root(path) || !below_root(path2))
        return real(from_dir, from, to_dir, to, flags);
    PLAIN(LINK, path, path2, real(from_dir, from, to_dir, to, flags));
}
int link(const char *from, const char *to) { return run_link(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags) {
    return run_link(from_dir, from, to_dir, to, flags);
}

/* The link's text stands in the place of the second path; it is not resolved. */
static int run_symlink(const char *text, int dir, const char *name) {
    REAL(int, "symlinkat", const char *, int, const char *);
    char path[PATH_MAX], text_copy[PATH_MAX];
    if (!active() || !path_at(dir, name, path) || !below_root(path)) return real(text, dir, name);
    unsigned created = 0, truncated = 0;
    int result;
    snprintf(text_copy, sizeof text_copy, "%s", text);
    pthread_mutex_lock(&lock);
    struct iovec bytes = {text_copy, strlen(text_copy)};
    RUN(SYMLINK, path, (char *)0, (int64_t)bytes.iov_len, 0, &bytes, 1, real(text, dir, name));
}
int symlink(const char *text, const char *name) { return run_symlink(text, AT_FDCWD, name); }
int symlinkat(const char *text, int dir, const char *name) { return run_symlink(text, dir, name); }
