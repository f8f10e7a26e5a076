"""One mount in this process: open the source, mount, serve, publish."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardfs.daemon import logs, mountpoint, sd_notify
from shardfs.daemon.opening import open_mounted
from shardfs.daemon.shutdown import drain
from shardfs.daemon.signals import Signals
from shardfs.daemon.tuning import prepare_process
from shardfs.model.exit_codes import ExitCode
from shardfs.model.redact import public_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.config.options import Options
    from shardfs.daemon.mount_statistics import Status
    from shardfs.daemon.sd_notify import Notifier
    from shardfs.daemon.shutdown import Writing
    from shardfs.daemon.status_server import StatusServer
    from shardfs.storage.mount_table import MountInfo

log = logging.getLogger(__name__)

LAST_ANSWERS_S = 5.0
"""Seconds that the daemon still serves programs with open files after SIGTERM."""

LAST_WORDS_S = 2.0
"""Seconds that a foreground process may take to exit after the mount has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountArguments:
    """What to mount, where and how.

    Args:
        source: an absolute path or a URL.
        mountpoint: a path without symbolic links.
        dead: the mount of a dead daemon to replace.
    """

    source: str
    mountpoint: str
    options: Options
    dead: MountInfo | None = None

    @property
    def source_name(self) -> str:
        """The name of the source for findmnt and messages, without secrets."""
        return self.options.fsname or public_name(self.source)

    @property
    def logs(self) -> logs.Logs:
        """The options of the log, for `logs.set_up`."""
        return logs.Logs(self.options.log_file, self.options.log_level, self.options.log_format)


def serve_in_foreground(arguments: MountArguments, ready: Callable[[], object]) -> int:
    """Serve in this process, log to standard error or a file, notify the service manager; return as `serve` does.

    Afterwards, the process ends within `LAST_WORDS_S`, even if threads still wait for the store.
    """
    tail = logs.set_up(arguments.logs, daemon=False)
    manager = sd_notify.from_environment(os.environ)

    def answering(status: Status) -> None:
        log.info("%s is mounted on %s", arguments.source_name, arguments.mountpoint)
        ready()
        words = f"{arguments.source_name} on {arguments.mountpoint}"
        if manager is not None:
            manager.watch(arguments.mountpoint, lambda: f"serving {words}: {status.line()}")

    code = serve(arguments, tail, answering, manager)
    # Exit soon: Python's shutdown may wait for threads that wait for the store.
    timer = threading.Timer(LAST_WORDS_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return code


def serve(
    arguments: MountArguments, tail: logs.Tail, ready: Callable[[Status], None], manager: Notifier | None = None
) -> int:
    """Open the source, mount it, answer requests until the unmount, and publish.

    Returns the exit code: `LEFT` if files stay in the journal, else 0. Raise MountError and the errors of
    `open_mounted`. Call it once, in the main thread, because it handles signals.

    Args:
        tail: what `logs.set_up` has returned, for the file `.shardfs/log`.
        ready: called once, when the mount answers.
        manager: notified when the mount ends, and while data is published; None for none.
    """
    prepare_process()  # before the imports, which are faster without garbage collection
    from shardfs.daemon.mount_statistics import Status
    from shardfs.fuse.access import AccessLog
    from shardfs.fuse.control import Control
    from shardfs.fuse.libfuse import Session
    from shardfs.fuse.server import Server
    from shardfs.fuse.settings import FuseSettings
    from shardfs.storage.pack_state import unfinished_jobs
    from shardfs.storage.source_locks import canonical

    options = arguments.options
    settings = FuseSettings.from_options(options)
    server = Server(settings, AccessLog.open(options.access_log) if options.access_log else None)
    web = _listening(options.metrics_addr)
    local_source = canonical(arguments.source)
    jobs = list(unfinished_jobs(local_source))
    tree, writing = open_mounted(arguments.source, arguments.mountpoint, options, server.waiting)
    gc.freeze()
    mount_options = [*settings.options(), f"fsname={arguments.source_name}", "subtype=shardfs"]
    session = Session(mount_options, settings.max_background())
    signals = Signals()  # before the mount: a signal after it would leave a mount without a daemon
    try:
        replacing = mountpoint.attach(session, arguments.mountpoint, arguments.dead)
        # A job looks for mounts when its state is written. A mount that it did not see then finds the state here.
        for job in set(unfinished_jobs(local_source)).difference(jobs):
            raise job.busy(job.root)
        session.negotiate()
        facts = {"source": arguments.source_name, "mountpoint": arguments.mountpoint, "layout": options.layout}
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


def _publish(writing: Writing, signals: Signals, manager: Notifier | None, *, hurried: bool) -> int:
    """Publish the remaining files; return the exit code."""
    progress = manager.publishing if manager else lambda _: None
    files = drain(writing, hurried=hurried, signalled=signals.ending_within, progress=progress)
    return ExitCode.LEFT if files else ExitCode.OK
