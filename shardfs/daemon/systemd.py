"""Tells the service manager how a mount fares, by sd_notify(3): ready, what it does, that it still answers.

Whether it answers is asked by another process, through the mount. A thread of ours would not do: a request that nobody
answers cannot be interrupted, not even by SIGKILL, and a process with such a thread never ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

STATUS_S = 20.0
"""How often the status is told, if the watchdog does not want to hear more often."""

EXTEND_S = 20.0
"""What remains for publishing after each word about it."""

FIRST_S = 0.05
"""How often a mount is asked until it answers for the first time."""

_PROBE = "import os, sys; sys.exit(os.getxattr(sys.argv[1], 'user.shardfs.pid').decode() != sys.argv[2])"


class Notifier:
    """One service manager."""

    def __init__(self, address: str, watchdog_s: float) -> None:
        """`address` as in `NOTIFY_SOCKET`; `watchdog_s` is 0 without a watchdog."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._every_s = min(STATUS_S, watchdog_s / 3) if watchdog_s else STATUS_S
        self._watched = watchdog_s > 0
        self._over = threading.Event()
        self._extended = -EXTEND_S
        self._probe: subprocess.Popen[bytes] | None = None

    def tell(self, **fields: str) -> bool:
        """Send fields such as `STATUS`; False if nobody listens any more."""
        text = "\n".join(f"{name}={' '.join(value.split())}" for name, value in fields.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            try:
                sender.sendto(text.encode("utf8", "replace"), self._address)
            except ConnectionRefusedError:
                return False
            except OSError:  # it does not read as fast as we tell, for instance
                return True
        return True

    def watch(self, mountpoint: str, status: Callable[[], str]) -> None:
        """From now on, in a thread: `READY` when the mount answers, and then how it goes, until `stopping`."""
        threading.Thread(target=self._watch, args=(mountpoint, status), name="shardfs-notify", daemon=True).start()

    def stopping(self) -> None:
        """The mount ends."""
        self._over.set()
        self.tell(STOPPING="1", STATUS="unmounting")

    def publishing(self, left: int) -> None:
        """The mount has gone, and so many files are being published: this may take longer than the manager allows."""
        if time.monotonic() - self._extended >= EXTEND_S / 2:
            self._extended = time.monotonic()
            told = {"WATCHDOG": "1"} if self._watched else {}
            self.tell(EXTEND_TIMEOUT_USEC=str(int(EXTEND_S * 1e6)), STATUS=f"publishing {left} files", **told)

    def _watch(self, mountpoint: str, status: Callable[[], str]) -> None:
        first = {"READY": "1"}
        while not self._over.is_set():
            answers = self._answers(mountpoint)
            if not self._over.is_set():
                alive = {"WATCHDOG": "1"} if self._watched else {}
                told = {**first, **alive, "STATUS": status()} if answers else {"STATUS": "the mount does not answer"}
                if not self.tell(**told) and not self._watched:
                    return
            first = {} if answers else first
            if self._probe is None:  # else it is still waited for, and an answer is told of as soon as it comes
                self._over.wait(FIRST_S if first else self._every_s)

    def _answers(self, mountpoint: str) -> bool:
        """Whether the mount answers before it would have to be asked again."""
        if self._probe is None:
            command = [sys.executable, "-IS", "-c", _PROBE, mountpoint, str(os.getpid())]
            null = subprocess.DEVNULL
            self._probe = subprocess.Popen(command, stdin=null, stdout=null, stderr=null)
        try:
            code = self._probe.wait(self._every_s)
        except subprocess.TimeoutExpired:
            return False  # it is asked no second time before it ends, and is not killed, which it would not notice
        self._probe = None
        return code == 0


def from_environment(environ: MutableMapping[str, str]) -> Notifier | None:
    """The manager that started this process, if it wants to be told. Its variables are taken away from children."""
    address = environ.pop("NOTIFY_SOCKET", "")
    every_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
    if not address.startswith(("/", "@")):
        return None
    ours = every_us.isdigit() and pid in ("", str(os.getpid()))
    return Notifier(address, int(every_us) / 1e6 if ours else 0.0)
