"""Start and end of a mount: check the mountpoint, fork, open the source, mount, report readiness, serve, publish.

The parent forks the daemon before any code uses fsspec or starts a thread, because fsspec's event loop does not survive
a fork. The child sends its errors through a pipe to the parent, which prints them and exits with the child's code.
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
import shlex
import signal
import stat
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from shardfs.daemon import logs, systemd
from shardfs.daemon.logs import Logs
from shardfs.daemon.shutdown import drain
from shardfs.daemon.unmount import ANSWER_S, daemon_of, unmount
from shardfs.model.errors import MountError, exit_code, is_expected, message
from shardfs.model.exit_codes import ExitCode
from shardfs.model.redact import is_path, public_name
from shardfs.model.text import counted
from shardfs.storage.mount_table import FS_TYPE, covered_by, mount_type, mounted_at
from shardfs.storage.source_locks import canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import TextIO

    from shardfs.daemon.shutdown import Writing
    from shardfs.daemon.status import ObservableTree, Status
    from shardfs.daemon.status_server import StatusServer
    from shardfs.daemon.systemd import Notifier
    from shardfs.fuse.libfuse import Session
    from shardfs.fuse.settings import FuseSettings
    from shardfs.storage.mount_table import MountInfo

log = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
KEPT_BYTES = 16 << 20

DESCRIPTORS = 2048
"""File descriptors for which the process reserves room: 1,024 open shards, and everything else."""

NAMED, COUNTED = 5, 1000
"""At most this many entries of a non-empty mountpoint are named, and counted."""

LAST_ANSWERS_S = 5.0
"""Seconds that the daemon still serves programs with open files after SIGTERM."""

LAST_WORDS_S = 2.0
"""Seconds that a foreground process may take to exit after the mount has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountArguments:
    """What to mount, where and how.

    Args:
        open_tree: opens the source and is called in the daemon. Its argument is a hook to call before waiting. Its
            second return value is None if the mount is read-only.
        fsname: name of the source for findmnt; None for `source` without secrets.
        nonempty: "warn", "refuse" or "allow" a mountpoint with entries. The mount hides these entries.
        access_log: file to which the daemon appends each request as a line of JSON.
        metrics_addr: HOST:PORT of the HTTP server for metrics and the status page.
        dead: the mount of a dead daemon to replace. `mount` sets it.
    """

    source: str
    mountpoint: str
    open_tree: Callable[[Callable[[], None]], tuple[ObservableTree, Writing | None]]
    fuse: FuseSettings
    fsname: str | None = None
    layout: str = "native"
    nonempty: str = "warn"
    logs: Logs = field(default_factory=Logs)
    access_log: str | None = None
    metrics_addr: str | None = None
    dead: MountInfo | None = None

    @property
    def shown(self) -> str:
        """The name of the source, without secrets."""
        return self.fsname or public_name(self.source)


def mount(
    arguments: MountArguments,
    *,
    foreground: bool,
    ready_timeout: float,
    ready: Callable[[], object] = lambda: None,
) -> int:
    """Mount a source; return the exit code.

    In the foreground, returns after the unmount, with exit code 3 if written data stays in the journal. Otherwise
    returns when the mount answers, and a daemon serves the mount.

    Args:
        ready_timeout: seconds until a daemon that does not answer is killed.
        ready: called in this process when the mount answers.
    """
    # Resolve links: libfuse interprets /dev/fd/N as an open FUSE device.
    mountpoint = os.path.realpath(arguments.mountpoint)
    dead = _check_mountpoint(mountpoint, arguments.nonempty)
    _check_apart(arguments.source, mountpoint)
    arguments = replace(arguments, mountpoint=mountpoint, dead=dead)
    if foreground:
        return _serve_in_foreground(arguments, ready)
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # else the end of this process would search all imported modules for garbage
    receive, send = os.pipe()
    # Block Ctrl-C until `_await_daemon` can kill the child.
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        _daemon(arguments, send, masked)
    os.close(send)
    code = _await_daemon(pid, receive, ready_timeout, arguments, masked)
    if code == 0:
        ready()
    return code


# ---- the mountpoint ----


def _check_mountpoint(mountpoint: str, nonempty: str = "warn") -> MountInfo | None:
    """The mount of a dead daemon to replace, or None. Raise MountError if the path cannot be a mountpoint."""
    while (top := mounted_at(mountpoint)) is not None and top.type == FS_TYPE:
        daemon = daemon_of(mountpoint, ANSWER_S)
        if daemon is None:
            raise MountError(errno.EBUSY, "shardfs is mounted here, and does not answer: shardfs umount -l", mountpoint)
        if daemon.pid:
            raise MountError(errno.EBUSY, "shardfs is mounted here already", mountpoint)
        below = covered_by(top)
        if below is None or below.type != FS_TYPE:
            log.warning("%s: replacing the mount of a dead daemon", mountpoint)
            return top
        unmount(mountpoint, lazy=True)
    # `stat` of an autofs trigger would block until this mount exists.
    if top is not None and top.type == "autofs":
        return None
    try:
        is_directory = stat.S_ISDIR(os.stat(mountpoint).st_mode)
    except FileNotFoundError as e:
        why = f"the mountpoint does not exist: mkdir -p {shlex.quote(mountpoint)}"
        raise MountError(errno.ENOENT, why, mountpoint) from e
    except OSError as e:
        raise MountError(e.errno, f"the mountpoint cannot be used: {e.strerror}", mountpoint) from e
    if not is_directory:
        raise MountError(errno.ENOTDIR, "the mountpoint is not a directory", mountpoint)
    if nonempty != "allow" and (hidden := _listed(mountpoint)):
        if nonempty == "refuse":
            why = f"the directory is not empty: the mount would hide {hidden}; move them, or use -o nonempty=warn"
            raise MountError(errno.ENOTEMPTY, why, mountpoint)
        log.warning("%s: the directory is not empty: the mount hides %s", mountpoint, hidden)
    return None


def _listed(directory: str | int) -> str:
    """Number of entries in a directory and the first names, as text. Empty if the directory is empty or unreadable."""
    try:
        with os.scandir(directory) as found:
            names = sorted(repr(entry.name) for entry in islice(found, COUNTED))
    except OSError:  # the kernel permits mounts on directories that this user cannot list
        return ""
    if not names:
        return ""
    count = counted(len(names), "entry", "entries") if len(names) < COUNTED else f"{COUNTED} entries or more"
    return f"{count}: {', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"


def _check_apart(source: str, mountpoint: str) -> None:
    """Raise MountError if the mount would cover its source, or be inside the source.

    The daemon reads the source to answer requests. A read through its own mount would wait for itself forever.
    """
    if "::" in source and not is_path(source):  # the daemon keeps an archive open
        return
    here, there = Path(mountpoint), Path(canonical(source))
    if there.is_relative_to(here) and there.exists():
        raise MountError(errno.EBUSY, "would cover the source", mountpoint)
    if here.is_relative_to(there):
        raise MountError(errno.EBUSY, "lies in the source, which would have to show itself", mountpoint)


# ---- serving ----


def _serve_in_foreground(arguments: MountArguments, ready: Callable[[], object]) -> int:
    """Serve in this process, log to standard error or a file, notify the service manager; return the exit code."""
    tail = logs.set_up(arguments.logs, daemon=False)
    manager = systemd.from_environment(os.environ)
    source, mountpoint = arguments.shown, arguments.mountpoint

    def answering(status: Status) -> None:
        log.info("%s is mounted on %s", source, mountpoint)
        ready()
        if manager is not None:
            manager.watch(mountpoint, lambda: f"serving {source} on {mountpoint}: {status.line()}")

    code = _serve(arguments, tail, answering, manager)
    # Exit soon: Python's shutdown may wait for threads that wait for the store.
    timer = threading.Timer(LAST_WORDS_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return code


def _serve(
    arguments: MountArguments, tail: logs.Tail, ready: Callable[[Status], None], manager: Notifier | None = None
) -> int:
    """Open the source, mount it, answer requests until the unmount, publish; return the exit code."""
    _prepare_process()  # before the imports, which are faster without garbage collection
    from shardfs.daemon.status import Status
    from shardfs.fuse.access import AccessLog
    from shardfs.fuse.control import Control
    from shardfs.fuse.libfuse import Session
    from shardfs.fuse.server import Server
    from shardfs.storage.pack_state import unfinished_jobs
    from shardfs.storage.source_locks import canonical

    server = Server(arguments.fuse, AccessLog.open(arguments.access_log) if arguments.access_log else None)
    web = _listening(arguments.metrics_addr)
    local_source = canonical(arguments.source)
    jobs = list(unfinished_jobs(local_source))
    tree, writing = arguments.open_tree(server.waiting)
    gc.freeze()
    mount_options = [*arguments.fuse.options(), f"fsname={arguments.shown}", "subtype=shardfs"]
    session = Session(mount_options, arguments.fuse.max_background())
    signals = _Signals()  # before the mount: a signal after it would leave a mount without a daemon
    try:
        replacing = _attach(session, arguments)
        # A job looks for mounts when its state is written. A mount that it did not see then finds the state here.
        for job in set(unfinished_jobs(local_source)).difference(jobs):
            raise job.busy(job.root)
        session.negotiate()
        facts = {"source": arguments.shown, "mountpoint": arguments.mountpoint, "layout": arguments.layout}
        if web is not None:
            facts["metrics_addr"] = web.address
        status = Status(server, tree, facts, writing)
        server.control = Control({b"status.json": status.as_json, b"metrics": status.as_prometheus, b"log": tail.text})
        if web is not None:
            web.start(status.as_prometheus)
        server.start(tree, session, signals.unmounted)
        if replacing is not None:
            session.replace(replacing)
        ready(status)
        number = signals.await_end()
        if manager is not None:
            manager.stopping()
        if number:
            log.info("%s: unmounting %s", signal.Signals(number).name, arguments.mountpoint)
        session.unmount()
        if number:
            signals.arrives_within(LAST_ANSWERS_S)
        return _publish(writing, signals, manager, hurried=number != 0) if writing is not None else 0
    finally:
        # Free nothing else here: threads may still wait for the store. The end of the process frees the rest.
        session.unmount()
        if (cache := getattr(tree.store, "cache", None)) is not None:
            cache.flush(LAST_WORDS_S)


def _listening(address: str | None) -> StatusServer | None:
    if address is None:
        return None
    from shardfs.daemon.status_server import StatusServer

    return StatusServer(address)


def _attach(session: Session, arguments: MountArguments) -> MountInfo | None:
    """Mount the session.

    Returns None once the session is attached. Otherwise returns the dead mount that the detached session must replace.
    """
    mountpoint, top = arguments.mountpoint, mounted_at(arguments.mountpoint)
    if top is None or top.type != FS_TYPE:
        session.mount(mountpoint)
        return None
    if top != arguments.dead:
        raise MountError(errno.EBUSY, "another shardfs was mounted here meanwhile", mountpoint)
    try:
        session.mount_detached()
        return top
    except OSError as e:
        if e.errno not in (errno.EPERM, errno.ENOSYS):
            raise
    # fusermount3 can neither mount over a dead mount nor move one. Between these two calls, nothing is mounted here.
    unmount(mountpoint, lazy=True)
    bare = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY)
    try:
        session.mount(mountpoint)
        if hidden := _listed(bare):
            log.warning("%s: the directory is not empty: the mount hides %s", mountpoint, hidden)
    finally:
        os.close(bare)
    return None


def _publish(writing: Writing, signals: _Signals, manager: Notifier | None, *, hurried: bool) -> int:
    """Publish the remaining files; return the exit code."""
    progress = manager.publishing if manager else lambda _: None
    left = drain(writing, hurried=hurried, signalled=signals.ending_within, progress=progress)
    return ExitCode.LEFT if left else ExitCode.OK


class _Signals:
    """Delivers signal numbers, and 0 for the unmount, to the main thread, which does not serve requests.

    Python runs signal handlers in the main thread only, but the kernel may interrupt any thread. A main thread that
    served requests would notice a signal only at the next request.
    """

    def __init__(self) -> None:
        self._receive, self._send = os.pipe()
        os.set_blocking(self._send, False)
        signal.set_wakeup_fd(self._send)
        for number in (*_ENDING, *_REPORTING):
            signal.signal(number, lambda _number, _frame: None)

    def unmounted(self) -> None:
        """Report the unmount. Called by a thread of the server."""
        os.write(self._send, b"\0")

    def await_end(self) -> int:
        """Wait for a signal that ends the mount, and return its number; 0 after an unmount."""
        while (number := os.read(self._receive, 1)[0]) in _REPORTING:
            _REPORTING[number]()
        return number

    def arrives_within(self, seconds: float) -> bool:
        """Whether a signal or the unmount arrives within this time."""
        return bool(select.select([self._receive], [], [], seconds)[0])

    def ending_within(self, seconds: float) -> bool:
        """Whether a terminating signal arrives within this time."""
        return self.arrives_within(seconds) and any(number in _ENDING for number in os.read(self._receive, 64))


def _dump_stacks() -> None:
    """Log the stacks of all threads."""
    names = "; ".join(f"{t.ident:#018x} is {t.name}" for t in threading.enumerate() if t.ident)
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        log.warning("SIGUSR1: stacks of all threads (%s)\n%s", names, file.read().rstrip())


def _change_verbosity() -> None:
    log.warning("SIGUSR2: the log level is %s now", logs.cycle())


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_REPORTING = {int(signal.SIGUSR1): _dump_stacks, int(signal.SIGUSR2): _change_verbosity}
"""Signals that do not end the mount -> function to call."""


def _prepare_process() -> None:
    """Tune limits, garbage collection and memory allocation of a serving process. Call before starting threads."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with suppress(OSError):
        # The kernel doubles the descriptor table as it fills. In a process with threads, each doubling takes 10 ms
        # during a request. So grow the table now, to a size that suffices for all open shards.
        os.close(fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, min(hard, DESCRIPTORS) - 1))
    # Each look-up allocates an object that lives for a while. By default the collector runs after a few hundred
    # look-ups. These runs take 4 % of the time of a request and free nothing.
    gc.set_threshold(50_000, 20, 100)
    _keep_memory()


def _keep_memory() -> None:
    """Let glibc keep `KEPT_BYTES` of freed memory instead of returning all of it to the kernel.

    Decoding allocates and frees whole chunks. Getting a page from the kernel costs as much as decoding part of a page.
    """
    with suppress(OSError, AttributeError):  # only glibc has mallopt
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 8 << 20), (M_TRIM_THRESHOLD, KEPT_BYTES)):
            mallopt(parameter, value)


def _daemon(arguments: MountArguments, send: int, masked: Iterable[int]) -> None:
    """Run the daemon in the forked child. Does not return: exits the process."""
    code, pipe = 0, os.fdopen(send, "w")
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        tail = logs.set_up(arguments.logs, daemon=True)

        def ready(status: Status) -> None:
            # Call setsid only now: during an automount, autofs lets only the process group of the automounter
            # access the mountpoint. The helper of mount(8) is in that process group.
            os.setsid()
            _report(pipe, 0, "".join(f"warning: {problem}\n" for problem in status.problems()))
            _detach()

        code = _serve(arguments, tail, ready)
    except BaseException as e:
        code = exit_code(e)
        if not is_expected(e):
            log.exception("the daemon ends")
        _report(pipe, code, message(e))
    finally:
        logging.shutdown()
        os._exit(code)


def _report(pipe: TextIO, code: int, text: str) -> None:
    """Send the exit code and messages to the parent and close the pipe. A pipe that is closed has had its report."""
    if not pipe.closed:
        with suppress(OSError), pipe:  # the parent may have exited
            json.dump([code, text], pipe)


def _detach() -> None:
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if null > 2:
        os.close(null)


def _await_daemon(pid: int, receive: int, seconds: float, arguments: MountArguments, masked: Iterable[int]) -> int:
    """Wait for the child's report, print its messages, return its exit code.

    Kills the child and returns `ExitCode.NOT_READY` if no report arrives within `seconds`.
    """
    mountpoint, reported = arguments.mountpoint, False
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        reported = bool(select.select([receive], [], [], seconds)[0])
    finally:  # also after Ctrl-C, which must end the child
        if not reported:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if arguments.dead is None and mount_type(mountpoint) == FS_TYPE:
                unmount(mountpoint, lazy=True)
    if not reported:
        sys.stderr.write(f"shardfs: {mountpoint}: not ready within {seconds:g} s: ")
        sys.stderr.write("-o ready_timeout=SECONDS waits longer\n")
        return ExitCode.NOT_READY
    with open(receive) as pipe:
        report = pipe.read()
    code, text = json.loads(report) if report else (1, "the daemon ended without a message; its log may tell more")
    for line in text.splitlines():
        sys.stderr.write(f"shardfs: {line}\n")
    return int(code)
