"""Signals to a serving process: those that end the mount, and those that make it report."""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import tempfile
import threading

from shardfs.daemon import logs

log = logging.getLogger(__name__)


class Signals:
    """Delivers signal numbers, and 0 for the unmount, to the main thread, which does not serve requests.

    The constructor, in the main thread, replaces the handlers of these signals for the rest of the process.

    Python runs signal handlers in the main thread only, but the kernel may interrupt any thread. A main thread that
    served requests would notice a signal only at the next request.
    """

    def __init__(self) -> None:
        receive, send = os.pipe()
        self._receive = receive
        self._send = send
        os.set_blocking(self._send, False)
        signal.set_wakeup_fd(self._send)
        for number in (*_ENDING, *_REPORTING):
            signal.signal(number, lambda _number, _frame: None)

    def unmounted(self) -> None:
        """Report the unmount. Called by a thread of the server."""
        os.write(self._send, b"\0")

    def await_end(self) -> int:
        """Wait for a signal that ends the mount, and return its number; 0 after an unmount.

        Meanwhile, SIGUSR1 logs the stacks of all threads, and SIGUSR2 changes the level of the log.
        """
        while (number := os.read(self._receive, 1)[0]) in _REPORTING:
            _REPORTING[number]()
        return number

    def arrives_within(self, seconds: float) -> bool:
        """Whether a signal or the unmount arrives within this time. It stays there for the next call."""
        return bool(select.select([self._receive], [], [], seconds)[0])

    def ending_within(self, seconds: float) -> bool:
        """Whether a terminating signal arrives within this time. Signals that make it report are dropped."""
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
