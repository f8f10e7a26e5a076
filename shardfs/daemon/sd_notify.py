"""Notifications to the service manager with sd_notify(3): readiness, status, watchdog."""

from __future__ import annotations

import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from shardfs.daemon.asking import Probe
from shardfs.model.text import counted

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

STATUS_S = 20.0
"""Seconds between status notifications. A watchdog may require a shorter interval."""

EXTEND_S = 20.0
"""Seconds by which each notification about publishing extends the time-out of the service manager."""

FIRST_S = 0.05
"""Seconds between probes until the mount answers for the first time."""

_SILENT = {"STATUS": "the mount does not answer"}


class Notifier:
    """Sends notifications to one service manager."""

    def __init__(self, address: str, watchdog_s: float) -> None:
        """`address` has the form of `NOTIFY_SOCKET`. `watchdog_s` is the watchdog time-out in seconds, 0 for none."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._every_s = min(STATUS_S, watchdog_s / 3) if watchdog_s else STATUS_S
        self._alive = {"WATCHDOG": "1"} if watchdog_s else {}
        self._over = threading.Event()
        self._extended = -EXTEND_S

    def tell(self, **fields: str) -> bool:
        """Send fields of sd_notify(3), such as `STATUS`, each as one line. Never blocks or raises OSError.

        Return False if the service manager has closed its socket; True even if the notification was lost.
        """
        text = "\n".join(f"{name}={' '.join(value.split())}" for name, value in fields.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            try:
                sender.sendto(text.encode("utf8", "replace"), self._address)
            except ConnectionRefusedError:
                return False
            except OSError:  # for example, the queue of the socket is full
                return True
        return True

    def watch(self, mountpoint: str, status: Callable[[], str]) -> None:
        """Start a thread that sends `READY` once the mount answers, then the status at intervals until `stopping`."""
        threading.Thread(target=self._watch, args=(mountpoint, status), name="shardfs-notify", daemon=True).start()

    def stopping(self) -> None:
        """Notify the service manager that the mount is ending, and end the notifications of `watch`."""
        self._over.set()
        self.tell(STOPPING="1", STATUS="unmounting")

    def publishing(self, files: int) -> None:
        """Report that `files` files remain to be published, and extend the stop time-out of the service manager.

        May be called at any rate: sends at most one notification in `EXTEND_S` / 2.
        """
        if time.monotonic() - self._extended >= EXTEND_S / 2:
            self._extended = time.monotonic()
            extended = str(int(EXTEND_S * 1e6))
            self.tell(EXTEND_TIMEOUT_USEC=extended, STATUS=f"publishing {counted(files, 'file')}", **self._alive)

    def _watch(self, mountpoint: str, status: Callable[[], str]) -> None:
        first = {"READY": "1"}
        probe = Probe(mountpoint)
        while not self._over.is_set():
            answers = probe.answers(self._every_s)
            if not self._over.is_set():
                fields = {**first, **self._alive, "STATUS": status()} if answers else _SILENT
                if not self.tell(**fields) and not self._alive:
                    return
            first = {} if answers else first
            if not probe.is_waiting:
                self._over.wait(FIRST_S if first else self._every_s)


def from_environment(environ: MutableMapping[str, str]) -> Notifier | None:
    """The service manager that started this process, or None if it expects no notifications.

    Removes the variables of sd_notify(3) from `environ`, so that child processes do not inherit them.
    """
    address = environ.pop("NOTIFY_SOCKET", "")
    every_us, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
    if not address.startswith(("/", "@")):
        return None
    ours = every_us.isdigit() and pid in ("", str(os.getpid()))
    return Notifier(address, int(every_us) / 1e6 if ours else 0.0)
