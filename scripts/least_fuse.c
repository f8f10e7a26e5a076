/* The smallest FUSE daemon that can show chunks as files: the baseline of bench_read.py, not for users.
 *
 *   least_fuse TABLE MOUNTPOINT
 *
 * It reads all metadata at the start. TABLE contains, little-endian and packed as below, a struct head, the nodes by inode
 * number, and the NUL-terminated paths of the shards. Inode 1 is the root, 2 its zarr.json, 3 its directory `c`; the
 * entries of every other directory are named 0, 1, 2, ..., with consecutive inode numbers. */
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <fuse_lowlevel.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define SECONDS 3600.0

struct head { uint64_t nodes, shards; };
struct node { uint64_t start; uint32_t size, shard, first, entries; }; /* entries: of a directory; else 0 */

static const struct node *nodes;
static int *shards;
static char *buffer;
static size_t capacity;

static int reserve(size_t size) {
    if (size <= capacity) return 1;
    free(buffer);
    capacity = posix_memalign((void **)&buffer, 4096, size) ? 0 : size;
    return capacity != 0;
}

static void describe(fuse_ino_t number, struct stat *st) {
    const struct node *n = &nodes[number];
    memset(st, 0, sizeof *st);
    st->st_ino = number;
    st->st_mode = n->entries ? S_IFDIR | 0555 : S_IFREG | 0444;
    st->st_nlink = n->entries ? 2 : 1;
    st->st_size = n->size;
    st->st_blocks = (n->size + 511) / 512;
    st->st_mtime = 1700000000;
}

static void fill(fuse_ino_t number, struct fuse_entry_param *e) {
    memset(e, 0, sizeof *e);
    e->ino = number;
    e->attr_timeout = e->entry_timeout = SECONDS;
    if (number) describe(number, &e->attr);
}

static fuse_ino_t child(fuse_ino_t parent, const char *name) {
    if (parent == 1) return !strcmp(name, "zarr.json") ? 2 : !strcmp(name, "c") ? 3 : 0;
    char *end;
    unsigned long i = strtoul(name, &end, 10);
    if (*name < '0' || *name > '9' || (*name == '0' && name[1]) || *end || i >= nodes[parent].entries) return 0;
    return nodes[parent].first + i;
}

static void on_lookup(fuse_req_t request, fuse_ino_t parent, const char *name) {
    struct fuse_entry_param e;
    fill(child(parent, name), &e); /* inode 0: the kernel caches that the name does not exist */
    fuse_reply_entry(request, &e);
}

static void on_getattr(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *file) {
    struct stat st;
    (void)file;
    describe(number, &st);
    fuse_reply_attr(request, &st, SECONDS);
}

static void on_open(fuse_req_t request, fuse_ino_t number, struct fuse_file_info *file) {
    (void)number, (void)file;
    fuse_reply_err(request, ENOSYS); /* after one ENOSYS, the kernel opens files and directories without requests */
}

static void on_read(fuse_req_t request, fuse_ino_t number, size_t size, off_t offset, struct fuse_file_info *file) {
    const struct node *n = &nodes[number];
    (void)file;
    if ((uint64_t)offset >= n->size) size = 0;
    else if (size > n->size - (uint64_t)offset) size = n->size - offset;
    ssize_t got = reserve(size) ? pread(shards[n->shard], buffer, size, n->start + offset) : -1;
    if (got < 0) fuse_reply_err(request, EIO);
    else fuse_reply_buf(request, buffer, got);
}

static void on_readdirplus(fuse_req_t request, fuse_ino_t number, size_t size, off_t offset,
                           struct fuse_file_info *file) {
    struct fuse_entry_param e;
    char name[24];
    size_t used = 0;
    (void)file;
    if (!reserve(size)) { fuse_reply_err(request, ENOMEM); return; }
    for (; offset < nodes[number].entries; offset++) {
        if (number == 1) strcpy(name, offset ? "c" : "zarr.json");
        else snprintf(name, sizeof name, "%ld", (long)offset);
        fill(nodes[number].first + offset, &e);
        size_t entry = fuse_add_direntry_plus(request, buffer + used, size - used, name, &e, offset + 1);
        if (entry > size - used) break;
        used += entry;
    }
    fuse_reply_buf(request, buffer, used);
}

static const struct fuse_lowlevel_ops operations = {
    .lookup = on_lookup, .getattr = on_getattr, .open = on_open, .opendir = on_open, .read = on_read,
    .readdirplus = on_readdirplus,
};

static int load(const char *path) {
    struct stat st;
    int fd = open(path, O_RDONLY);
    if (fd < 0 || fstat(fd, &st)) return 0;
    const struct head *head = mmap(NULL, st.st_size, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (head == MAP_FAILED) return 0;
    nodes = (const struct node *)(head + 1);
    shards = calloc(head->shards, sizeof *shards);
    const char *shard = (const char *)(nodes + head->nodes);
    for (uint64_t i = 0; shards && i < head->shards; i++, shard += strlen(shard) + 1)
        if ((shards[i] = open(shard, O_RDONLY | O_CLOEXEC)) < 0) return 0;
    return shards != NULL;
}

int main(int argc, char **argv) {
    struct fuse_args args = FUSE_ARGS_INIT(0, NULL);
    if (argc != 3 || !load(argv[1])) {
        perror(argc > 1 ? argv[1] : "usage: least_fuse TABLE MOUNTPOINT");
        return 2;
    }
    fuse_opt_add_arg(&args, argv[0]);
    fuse_opt_add_arg(&args, "-oro,fsname=least_fuse"); /* ro: otherwise the kernel requests the atime after every read */
    struct fuse_session *session = fuse_session_new(&args, &operations, sizeof operations, NULL);
    if (!session || fuse_session_mount(session, argv[2])) return 1;
    fuse_set_signal_handlers(session);
    int failed = fuse_session_loop(session) < 0;
    fuse_session_unmount(session);
    fuse_session_destroy(session);
    return failed;
}
