"""Start and end of a mount: check the mountpoint, fork, open the source, mount, report that it answers; unmount.

A daemon forks before anything touches fsspec or starts a thread: fsspec's event loop does not survive a fork. What goes
wrong in the child travels through a pipe to the parent, which prints it and exits with its code.
"""

from __future__ import annotations

import ctypes
import errno
import faulthandler
import fcntl
import gc
import json
import logging
import os
import resource
import select
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from shardfs import logs, notify
from shardfs.cache import nothing
from shardfs.errors import MountError, exit_code, is_expected, message
from shardfs.logs import Logs
from shardfs.masking import public_name
from shardfs.mounts import FS_TYPE, mount_type

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.fuse.server import FuseSettings, Server
    from shardfs.scraping import Scraping
    from shardfs.status import Status
    from shardfs.tree import Tree

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
KEPT_BYTES = 16 << 20

NOT_READY = 6
"""Exit code: the mount did not answer in time."""

DETACH = 2  # umount2(2): MNT_DETACH

DESCRIPTORS = 2048
"""Room in the table of descriptors: for 1,024 shards, and what else there is."""

DEFAULT_LOGS = Logs()

UNMOUNTED = b"\0"
"""What the server says through the pipe in which signals have their numbers."""

ANSWER_S = 10.0
"""How long a mount may take to say whose it is."""

_ASK = """\
import os, sys
try:
    print(os.getxattr(sys.argv[1], 'user.shardfs.pid').decode())
except OSError:
    print(0)
"""

LAST_ANSWERS_S = 5.0
"""After SIGTERM, how long programs that still use the mount are served before the daemon ends under them."""


LAST_WORDS_S = 2.0
"""How long a process in the foreground has for itself after that."""


def mount(
    source: str,
    mountpoint: str,
    *,
    foreground: bool,
    ready_timeout: float,
    open_tree: Callable[[Callable[[], None]], Tree],
    fuse: FuseSettings,
    fsname: str | None = None,
    layout: str = "native",
    told: Logs = DEFAULT_LOGS,
    access_log: str | None = None,
    metrics_addr: str | None = None,
) -> int:
    """Mount a source; the exit code. In the foreground, returns when it is unmounted, else when the mount answers.

    Args:
        open_tree: opens the source, given the hook to call before waiting. Called in the daemon.
        ready_timeout: seconds until a daemon that does not answer is ended.
        fsname: what findmnt shows as the source.
        access_log: a file to which each request is added, as a line of JSON.
        metrics_addr: HOST:PORT at which Prometheus may ask.
    """
    # Without links: libfuse takes /dev/fd/N for a device that was opened before.
    mountpoint = os.path.realpath(mountpoint)
    _check_mountpoint(mountpoint)

    shown = fsname or public_name(source)

    what = _Mount(mountpoint, open_tree, fuse, shown, layout, access_log, metrics_addr)
    if foreground:
        tail = logs.set_up(told, daemon=False)
        manager = notify.from_environment(os.environ)

        def ready(status: Status) -> None:
            log.info("%s is mounted on %s", shown, mountpoint)
            if manager is not None:
                manager.watch(mountpoint, lambda: f"serving {shown} on {mountpoint}: {status.line()}")

        _serve(what, tail, ready, manager.stopping if manager is not None else nothing)
        _end_soon()
        return 0
    sys.stdout.flush()
    sys.stderr.flush()
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        _daemon(what, send, told)
    os.close(send)
    return _await_daemon(pid, receive, ready_timeout, mountpoint)


# ---- the mountpoint ----


def _check_mountpoint(mountpoint: str) -> None:
    # A look at an autofs trigger would wait for the very mount that is being made.
    if mount_type(mountpoint) == "autofs":
        return
    if mount_type(mountpoint) == FS_TYPE:
        pid = _daemon_of(mountpoint, ANSWER_S)
        if pid is None:
            raise MountError(errno.EBUSY, "shardfs is mounted here, and does not answer: shardfs umount -l", mountpoint)
        if pid:
            raise MountError(errno.EBUSY, "shardfs is mounted here already", mountpoint)
        log.warning("%s: clearing the mount that a dead daemon left", mountpoint)
        _unmount(mountpoint, lazy=True)
    try:
        is_directory = stat.S_ISDIR(os.stat(mountpoint).st_mode)
    except OSError as e:
        raise MountError(e.errno, e.strerror, mountpoint) from e
    if not is_directory:
        raise MountError(errno.ENOTDIR, "is not a directory", mountpoint)


# ---- serving ----


class _Mount(NamedTuple):
    """What is to be served, and how."""

    mountpoint: str
    open_tree: Callable[[Callable[[], None]], Tree]
    fuse: FuseSettings
    shown: str
    layout: str
    access_log: str | None
    metrics_addr: str | None


def _serve(what: _Mount, tail: logs.Tail, ready: Callable[[Status], None], stopping: Callable[[], None]) -> None:
    """Open, mount, answer requests until unmounted."""
    from shardfs.fuse.access import AccessLog
    from shardfs.fuse.lowlevel import Session
    from shardfs.fuse.server import Server

    _prepare_process()
    server = Server(what.fuse, AccessLog.open(what.access_log) if what.access_log else None)
    scraping = _listening(what.metrics_addr)
    tree = what.open_tree(server.waiting)
    session = Session([*what.fuse.options(), f"fsname={what.shown}", "subtype=shardfs"], what.fuse.limits())
    session.mount(what.mountpoint)

    receive, send = os.pipe()
    os.set_blocking(send, False)
    # Signals arrive through the pipe as well. Python runs their handlers in the main thread alone, while the kernel
    # may interrupt any other thread, and a main thread that served would not notice before the next request.
    signal.set_wakeup_fd(send)
    for number in (*_ENDING, *_TELLING):
        signal.signal(number, lambda _number, _frame: None)
    try:
        session.negotiate()
        status = _observed(what, server, tree, tail, scraping)
        server.start(tree, session, lambda: os.write(send, UNMOUNTED))
        ready(status)
        while (told := os.read(receive, 1)) != UNMOUNTED and told[0] in _TELLING:
            _TELLING[told[0]]()
        stopping()
        if told != UNMOUNTED:
            log.info("%s: unmounting %s", signal.Signals(told[0]).name, what.mountpoint)
            session.unmount()
            select.select([receive], [], [], LAST_ANSWERS_S)
    finally:
        # Threads may still wait for the store, so what they use is left for the end of the process to free.
        session.unmount()


def _listening(address: str | None) -> Scraping | None:
    if address is None:
        return None
    from shardfs.scraping import Scraping

    return Scraping(address)


def _observed(what: _Mount, server: Server, tree: Tree, tail: logs.Tail, scraping: Scraping | None) -> Status:
    """What can be told of the mount, and told at the places where it is asked for."""
    from shardfs.fuse.control import Control
    from shardfs.status import Status

    facts = {"source": what.shown, "mountpoint": what.mountpoint, "layout": what.layout}
    if scraping is not None:
        facts["metrics_addr"] = scraping.address
    status = Status(server, tree, facts)
    server.control = Control({b"status.json": status.as_json, b"metrics": status.as_prometheus, b"log": tail.text})
    if scraping is not None:
        scraping.start(status.as_prometheus)
    return status


def _dump_stacks() -> None:
    """What every thread does right now, into the log."""
    names = "; ".join(f"{t.ident:#018x} is {t.name}" for t in threading.enumerate() if t.ident)
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        log.warning("SIGUSR1: stacks of all threads (%s)\n%s", names, file.read().rstrip())


def _change_verbosity() -> None:
    log.warning("SIGUSR2: the log level is %s now", logs.cycle())


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TELLING = {int(signal.SIGUSR1): _dump_stacks, int(signal.SIGUSR2): _change_verbosity}
"""Signals, and what they do."""


def _prepare_process() -> None:
    """What a process that serves a mount wants otherwise than Python has it. Before it starts threads."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with suppress(OSError):
        # The kernel doubles the table of descriptors as it fills. With threads that takes 10 ms each time, in the
        # middle of a request; so make it large enough for the shards that are kept open now.
        os.close(fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, min(hard, DESCRIPTORS) - 1))
    # Each look-up leaves an object for a while, so that by default the collector runs for every few hundred: 4 % of
    # the time of a request, and it never finds a thing.
    gc.set_threshold(50_000, 20, 100)
    gc.freeze()
    _keep_memory()


def _keep_memory() -> None:
    """Have the C library keep a little of what is given back to it: chunks come and go, and all of their memory is
    touched. To get a page anew from the kernel costs as much as decoding a part of it."""
    with suppress(OSError, AttributeError):  # it is glibc's
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 8 << 20), (M_TRIM_THRESHOLD, KEPT_BYTES)):
            mallopt(parameter, value)


def _daemon(what: _Mount, send: int, told: Logs) -> None:
    """The child's life; does not return."""
    code = 0
    try:
        tail = logs.set_up(told, daemon=True)

        def ready(_status: Status) -> None:
            # Not before: while an automount is under way, autofs lets only the process group
            # of the automounter look at the mountpoint, and the helper of mount(8) belongs to it.
            os.setsid()
            _report(send, 0, "")
            _detach()

        _serve(what, tail, ready, nothing)
    except BaseException as e:
        code = exit_code(e)
        if not is_expected(e):
            log.exception("the daemon ends")
        _report(send, code, message(e))
    finally:
        logging.shutdown()
        os._exit(code)


def _end_soon() -> None:
    """The process shall not outlive its mount: threads may wait for a store, and Python's end for some of these."""
    timer = threading.Timer(LAST_WORDS_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _report(send: int, code: int, text: str) -> None:
    with suppress(OSError), open(send, "w") as pipe:  # the parent may have gone, or have been told before
        json.dump([code, text], pipe)


def _detach() -> None:
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if null > 2:
        os.close(null)


def _await_daemon(pid: int, receive: int, seconds: float, mountpoint: str) -> int:
    """What the child reports; 6 if it reports nothing in time."""
    reported = False
    try:
        reported = bool(select.select([receive], [], [], seconds)[0])
    finally:  # Ctrl-C ends the child, too
        if not reported:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if mount_type(mountpoint) == FS_TYPE:
                _unmount(mountpoint, lazy=True)
    if not reported:
        sys.stderr.write(f"shardfs: {mountpoint}: not ready within {seconds:g} s\n")
        return NOT_READY
    with open(receive) as pipe:
        told = pipe.read()
    code, text = json.loads(told) if told else (1, "the daemon ended without a word")
    if text:
        sys.stderr.write(f"shardfs: {text}\n")
    return int(code)


# ---- unmounting ----


def is_mounted(mountpoint: str) -> bool:
    """Whether shardfs is mounted there, be it that its daemon is dead."""
    return mount_type(_mounted_path(mountpoint)) == FS_TYPE


def _mounted_path(mountpoint: str) -> str:
    """As mountinfo has it. A path that is a mount itself is not looked at: its daemon may hang."""
    path = os.path.abspath(mountpoint)
    return path if mount_type(path) == FS_TYPE else os.path.realpath(path)


def umount(mountpoint: str, *, timeout: float, lazy: bool, patient: bool = False) -> int:
    """Unmount and wait until the daemon has gone; the exit code, 1 if the mount is busy or no mount of shardfs.

    Args:
        timeout: seconds to wait for the daemon; and if `patient`, for programs that use the mount.
    """
    mountpoint = _mounted_path(mountpoint)
    if mount_type(mountpoint) != FS_TYPE:
        raise MountError(errno.EINVAL, "is not a mount of shardfs", mountpoint)
    pid = None if lazy else _daemon_of(mountpoint, ANSWER_S)
    daemon = _process(pid or 0)
    try:
        _unmount_within(timeout if patient else 0.0, mountpoint, lazy=lazy or pid == 0)
    except OSError as e:
        if e.errno != errno.EBUSY:
            raise
        sys.stderr.write(f"shardfs: {mountpoint}: busy: a program has a file or its current directory there\n")
        return 1
    if daemon < 0:
        return 0
    if not select.select([daemon], [], [], timeout)[0]:
        sys.stderr.write(f"shardfs: {mountpoint}: unmounted, but process {pid} has not ended within {timeout:g} s\n")
        return 1
    return 0


def _unmount_within(seconds: float, mountpoint: str, *, lazy: bool) -> None:
    """Try again while it is busy."""
    end = time.monotonic() + seconds
    while True:
        try:
            return _unmount(mountpoint, lazy=lazy)
        except OSError as e:
            if e.errno != errno.EBUSY or time.monotonic() >= end:
                raise
        time.sleep(0.2)


def _daemon_of(mountpoint: str, seconds: float) -> int | None:
    """The daemon's process number, as it says itself; 0 if it is dead, None if it does not answer within `seconds`.

    `stat` would not tell: the kernel knows the answer by heart. Another process asks, as a question that the daemon has
    read but does not answer cannot be taken back, not even by SIGKILL.
    """
    command = [sys.executable, "-IS", "-c", _ASK, mountpoint]
    asker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    try:
        answer, _ = asker.communicate(timeout=seconds)
        return int(answer or 0)
    except subprocess.TimeoutExpired:
        asker.kill()
        with suppress(subprocess.TimeoutExpired):
            asker.wait(1)  # as long as it is there the mount is in use
        return None
    finally:
        if asker.stdout is not None:
            asker.stdout.close()


def _process(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 if there is none."""
    with suppress(OSError):
        return os.pidfd_open(pid) if pid else -1
    return -1


def _unmount(mountpoint: str, *, lazy: bool) -> None:
    """Raise OSError with what the kernel says, EBUSY among it."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(mountpoint), DETACH if lazy else 0):
            number = ctypes.get_errno()
            raise MountError(number, os.strerror(number), mountpoint)
        return
    command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", mountpoint]
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if ended.returncode:  # it says why in words only; a mount of ours that it leaves in place is in use
        busy = mount_type(mountpoint) == FS_TYPE
        raise MountError(errno.EBUSY if busy else errno.EPERM, ended.stderr.strip(), mountpoint)
