"""Log destinations, log formats (text, JSON, systemd journal priorities), and a buffer of the last log lines."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import sys
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

from shardfs.model.redact import redacted
from shardfs.model.text import printable

KEPT = 1000
"""Number of lines that `.shardfs/log` shows."""

LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
"""The levels that SIGUSR2 cycles through."""


class Logs(NamedTuple):
    """The options of a log.

    Args:
        file: the path of the log file; None for syslog, or standard error in the foreground.
        level: the lowest level, in lower case.
        form: "text" or "json".
    """

    file: str | None = None
    level: str = "warning"
    form: str = "text"


class Tail(logging.Handler):
    """Keeps the last `KEPT` lines of the log in memory. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))

    def text(self) -> bytes:
        """The kept lines, oldest first, as the content of a file in UTF-8."""
        return "".join(f"{line}\n" for line in list(self._lines)).encode(errors="backslashreplace")


class _File(logging.handlers.WatchedFileHandler):
    """A log file that is created again after log rotation. An error while reopening never reaches the logging code."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)


def set_up(logs: Logs, *, daemon: bool) -> Tail:
    """Configure the root logger anew, and return the buffer of the last log lines.

    `daemon`: without a log file, log to syslog, or nowhere if there is no /dev/log. Raise OSError if the log file
    cannot be opened.
    """
    handler, tail = _handler(logs.file, daemon=daemon), Tail()
    handler.setFormatter(_formatter(handler, logs))
    tail.setFormatter(_Json() if logs.form == "json" else _Text(_IN_A_FILE))
    logging.basicConfig(level=logs.level.upper(), handlers=[handler, tail], force=True)
    return tail


def require_appendable(path: str) -> None:
    """Raise OSError if a log cannot be appended to a file, which need not exist. Leaves no new file behind."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        os.close(os.open(path, flags))
    except FileNotFoundError:
        target = os.path.realpath(path)  # O_EXCL follows no links
        with suppress(FileExistsError):  # a daemon has created its log in the meantime
            os.close(os.open(target, flags | os.O_CREAT | os.O_EXCL, 0o600))
            os.unlink(target)


def cycle() -> str:
    """Switch to the next more verbose level, or from the last to the first. Return the name of the new level."""
    root = logging.getLogger()
    lower = [level for level in LEVELS if level < root.level]
    root.setLevel(lower[0] if lower else LEVELS[0])
    return logging.getLevelName(root.level).lower()


def _handler(file: str | None, *, daemon: bool) -> logging.Handler:
    if file is not None:
        return _File(file, encoding="utf8", errors="backslashreplace")
    if not daemon:
        return logging.StreamHandler()
    if os.path.exists("/dev/log"):
        return logging.handlers.SysLogHandler("/dev/log", logging.handlers.SysLogHandler.LOG_DAEMON)
    return logging.NullHandler()


_IN_A_FILE = "%(asctime)s %(levelname)s %(message)s"
_ELSEWHERE = "shardfs[%(process)d]: %(message)s"


def _formatter(handler: logging.Handler, logs: Logs) -> logging.Formatter:
    form = _Json() if logs.form == "json" else _Text(_IN_A_FILE if logs.file else _ELSEWHERE)
    if type(handler) is logging.StreamHandler and is_journal():
        return _Journal(_Text("%(message)s") if logs.form == "text" else form)
    return form


def is_journal() -> bool:
    """Whether standard error is connected to the systemd journal, by `JOURNAL_STREAM` of systemd.exec(5)."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        stream = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return (device, inode) == (str(stream.st_dev), str(stream.st_ino))


class _Text(logging.Formatter):
    """Removes secrets from messages and tracebacks.

    A message is one line, and the lines of a traceback are indented: names of files cannot forge a line of the log.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(redacted(record.message))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"  {printable(line)}" for line in redacted(super().formatException(ei)).splitlines())


class _Json(logging.Formatter):
    """One JSON object per line, with secrets removed."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps({k: redacted(v) if isinstance(v, str) else v for k, v in fields.items()})


class _Journal(logging.Formatter):
    """Prefixes each line with its priority, as in sd-daemon(3)."""

    PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.DEBUG, 7))

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        priority = next((p for level, p in self.PRIORITIES if record.levelno >= level), 7)
        return "\n".join(f"<{priority}>{line}" for line in self._inner.format(record).splitlines() or [""])
