"""Questions to mounts: their status, whether they answer at all, and to publish.

A child process asks each question, because a request that a daemon has read but does not answer cannot be interrupted,
not even by SIGKILL. No function waits without limit. `stat` proves nothing: the kernel answers it from its cache.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from shardfs.daemon.mount_status import MAX_STATUS, parse_status
from shardfs.storage.mount_table import FS_TYPE, entries, topmost

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.storage.mount_table import MountInfo

INTERVAL_S = 0.5
"""Seconds between the calls of `progress` in `flush`."""

PATIENCE_S = 0.7
"""Seconds to wait for the answers of all mounts together."""

GRACE_S = 10.0
"""Seconds after the time limit of a flush in which the mount may still report its time-out."""

_READ_STATUS = """\
import os, sys
try:
    with open(sys.argv[1] + "/.shardfs/status.json", "rb") as file:
        sys.stdout.buffer.write(file.read(int(sys.argv[2])))
except OSError as e:
    sys.exit(e.errno)
"""

_FLUSH = """\
import os, sys
try:
    os.setxattr(sys.argv[1], 'user.shardfs.flush', sys.argv[2].encode())
except OSError as e:
    sys.exit(e.errno)
"""

_COMPARE_PID = "import os, sys; sys.exit(os.getxattr(sys.argv[1], 'user.shardfs.pid').decode() != sys.argv[2])"


class MountState(StrEnum):
    """How a mount reacts to a request for its status.

    ANSWERS: with a status. DEAD: its daemon has ended. HANGS: not in time. CLOSED: this user may not read it.
    OLD: with something that this version cannot parse.
    """

    ANSWERS = "answers"
    DEAD = "dead"
    HANGS = "hangs"
    CLOSED = "closed"
    OLD = "old"


class _Meaning(NamedTuple):
    """What a state means to a user. `fix` is the remedy, with {} for the mountpoint; empty if none is needed."""

    finding: str
    fix: str = ""
    wrong: bool = False
    errnos: frozenset[int] = frozenset()
    """The errors of a mount in this state."""


_STATES = {
    MountState.ANSWERS: _Meaning("answers"),
    MountState.DEAD: _Meaning(
        "its daemon has died, and the mount remains",
        "shardfs umount --lazy {}",
        wrong=True,
        errnos=frozenset({errno.ENOTCONN, errno.ECONNABORTED}),
    ),
    MountState.HANGS: _Meaning("does not answer", "shardfs umount --lazy {}, and mount it again", wrong=True),
    MountState.CLOSED: _Meaning(
        "belongs to another user, and is not open to others", errnos=frozenset({errno.EACCES, errno.EPERM})
    ),
    MountState.OLD: _Meaning("reports no status that this version of shardfs can read", "shardfs umount {}"),
}


class Mount(NamedTuple):
    """A mount of shardfs.

    Args:
        mountpoint: an absolute path without symbolic links.
        source: the name of the source, without secrets.
        status: the content of its `status.json`, as `parse_status` returns it; None in all states but `ANSWERS`.
    """

    mountpoint: str
    source: str
    state: MountState
    status: dict[str, Any] | None

    @property
    def pid(self) -> int | None:
        """The process number of the daemon; None if the mount does not report it."""
        return None if self.status is None else int(self.status["pid"])

    @property
    def writing(self) -> dict[str, Any]:
        """What a mount reports about publishing: see `Writing.state`. Empty if it is read-only or reports no status."""
        return (self.status and self.status["writing"]) or {}

    @property
    def finding(self) -> str:
        """What the state means to a user: the end of a sentence about the mount."""
        return _STATES[self.state].finding

    @property
    def fix(self) -> str:
        """The remedy for the state, as a command where there is one; empty if none is needed."""
        return _STATES[self.state].fix.format(self.mountpoint)

    @property
    def is_wrong(self) -> bool:
        """Whether the state is a problem for programs on the mount."""
        return _STATES[self.state].wrong


def mounts(mountpoint: str | None = None) -> list[Mount]:
    """Return the mounts of shardfs that this process sees, or only the one at `mountpoint`. Takes less than a second.

    `mountpoint` is an absolute path without symbolic links. If mounts cover each other, only the topmost one counts.
    """
    wanted = [e for e in topmost().values() if e.type == FS_TYPE and mountpoint in (None, e.mountpoint)]
    questions = [_question(e) for e in wanted]
    end = time.monotonic() + PATIENCE_S
    answers = [(e, _answer(e, question, end)) for e, question in zip(wanted, questions, strict=True)]
    if all(mount.state is MountState.ANSWERS for _, mount in answers):
        return [mount for _, mount in answers]
    numbers = {e.number for e in entries()}  # the others may have been unmounted: then the directory below has answered
    return [mount for e, mount in answers if mount.state is MountState.ANSWERS or e.number in numbers]


def ask(mount: MountInfo, seconds: float) -> Mount:
    """The state of one mount; `HANGS` if it does not answer within `seconds`. Then takes up to a second more."""
    answer = _answer(mount, _question(mount), time.monotonic() + seconds)
    if mount in _stuck:
        with suppress(subprocess.TimeoutExpired):
            _stuck[mount].wait(1)  # the mount stays busy until the killed process has ended
    return answer


_stuck: dict[MountInfo, subprocess.Popen[bytes]] = {}
"""Mounts that did not answer, with the process that still waits for them although it was killed."""


def _question(mount: MountInfo) -> subprocess.Popen[bytes] | None:
    """Start a process that asks a mount for its status; None while an earlier one waits for this mount."""
    if mount in _stuck:
        if _stuck[mount].poll() is None:
            return None
        del _stuck[mount]
    return _started(_READ_STATUS, mount.mountpoint, str(MAX_STATUS + 1), output=subprocess.PIPE)


def _started(program: str, *arguments: str, output: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-IS", "-c", program, *arguments]
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=output, stderr=null, start_new_session=True)


def _answer(mount: MountInfo, question: subprocess.Popen[bytes] | None, end: float) -> Mount:
    """The state of a mount, and its status, from the process that asks the mount. Waits until the time `end`."""
    state, status = MountState.HANGS, None
    if question is not None:
        try:
            data, _ = question.communicate(timeout=max(end - time.monotonic(), 0.01))
            status = parse_status(data)
            code = question.returncode
            by_errno = (state for state, meaning in _STATES.items() if code in meaning.errnos)
            state = next(by_errno, MountState.OLD) if status is None else MountState.ANSWERS
        except subprocess.TimeoutExpired:
            question.kill()  # no effect while the process waits uninterruptibly
            _stuck[mount] = question
        finally:
            if question.stdout is not None:
                question.stdout.close()
    return Mount(mount.mountpoint, mount.source, state, status)


class Probe:
    """Asks one mount, again and again, whether the daemon in this process answers."""

    def __init__(self, mountpoint: str) -> None:
        self._mountpoint = mountpoint
        self._question: subprocess.Popen[bytes] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the last question has no answer yet. The next `answers` continues to wait for this answer."""
        return self._question is not None

    def answers(self, seconds: float) -> bool:
        """Whether the mount answers within `seconds`, and its daemon is this process.

        Returns False early if another daemon answers, or if the mount reports an error.
        """
        if self._question is None:
            self._question = _started(_COMPARE_PID, self._mountpoint, str(os.getpid()))
        try:
            code = self._question.wait(seconds)
        except subprocess.TimeoutExpired:
            return False  # start no second process until this one exits: SIGKILL cannot end it
        self._question = None
        return code == 0


def flush(path: str, seconds: float, progress: Callable[[], object] = lambda: None) -> None:
    """Make a mount publish all data written at or below `path`, which must be on a mount of shardfs.

    Calls `progress` regularly while waiting. Raise OSError with the first failure; EROFS if the mount is read-only.
    Raise TimeoutError after `seconds`, or up to `GRACE_S` later if the mount does not answer at all.
    """
    question = _started(_FLUSH, path, f"{seconds:g}")
    end = time.monotonic() + seconds + GRACE_S
    code = None
    while code is None and time.monotonic() < end:
        with suppress(subprocess.TimeoutExpired):
            code = question.wait(INTERVAL_S)
        progress()
    if code is None:
        question.kill()  # no effect while the process waits uninterruptibly
        why = f"the mount does not answer within {seconds + GRACE_S:g} s; see `shardfs doctor`"
        raise TimeoutError(errno.ETIMEDOUT, why, path)
    if code:
        raise OSError(code, os.strerror(code), path)
