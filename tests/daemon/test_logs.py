"""What a log, a terminal and an error show of names and URLs that may contain anything."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest

from shardfs.cli import run
from shardfs.cli.printing import echo
from shardfs.daemon.logs import Logs, require_appendable, set_up
from shardfs.model import redact
from shardfs.model.errors import message

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOSTILE = "a\x1b]0;title\x07b\x9b31m\r\nforged line\x7f\udcff"

CONTROL = {chr(n) for n in (*range(32), 127, *range(128, 160))} - {"\n"}


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield root
    for handler in root.handlers:
        if handler not in before:
            handler.close()
    root.handlers[:], root.level = before, level


@pytest.mark.parametrize("form", ["text", "json"])
def test_logs(form: str, tmp_path: Path, root_logger: logging.Logger) -> None:
    """One message is one line; a traceback cannot begin a line, so neither forges what looks like another message."""
    tail = set_up(Logs(str(tmp_path / "log"), "info", form), daemon=True)
    root_logger.warning("%s: is damaged", HOSTILE)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        root_logger.exception("of %s", HOSTILE)
    for text in ((tmp_path / "log").read_text(), tail.text().decode()):
        assert not CONTROL & set(text), repr(text)
        assert "forged line" in text
        assert not any(line.startswith("forged") for line in text.splitlines())
        assert "Traceback" in text


def test_a_log_that_a_daemon_creates_while_doctor_looks_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    os_open = os.open

    def daemon_is_faster(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_CREAT:
            log.write_text("started\n")
        return os_open(path, flags, mode)

    monkeypatch.setattr(os, "open", daemon_is_faster)
    require_appendable(str(log))
    assert log.read_text() == "started\n"


def test_a_log_that_does_not_exist_is_not_created_by_looking(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("log")
    for path in (tmp_path / "log", link):
        require_appendable(str(path))
        assert os.listdir(tmp_path) == ["link"]
    with pytest.raises(FileNotFoundError):
        require_appendable(str(tmp_path / "none/log"))


def test_output_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    echo(HOSTILE, f"second {HOSTILE}")
    echo(HOSTILE, err=True)
    output = capsys.readouterr()
    for text, lines in ((output.out, 2), (output.err, 1)):
        assert not CONTROL & set(text), repr(text)
        assert text.count("\n") == lines


def test_errors() -> None:
    assert message(FileNotFoundError(2, "No such file", "x\x1b[31m\x9b")) == "x\\x1b[31m\\x9b: No such file"
    assert [message(e) for e in (TimeoutError(), ConnectionResetError())] == ["TimeoutError", "ConnectionResetError"]


@pytest.mark.parametrize("command", ["ls", "info", "verify"])
def test_errors_of_commands(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, str(tmp_path / "\x1b[31mx\x9b\ny")]) != 0
    told = capsys.readouterr()
    assert not CONTROL & set(told.out + told.err)


def test_secrets_of_a_url_are_not_in_tracebacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in its own form, not decoded, and not the values of its query, which clients reorder."""
    url = "https://user:pass%40word@host/a?X-Amz-Signature=0123456789abcdef&X-Amz-Date=20260101T000000Z"

    def fail(*_args: object, **_kwargs: object) -> None:
        raise ZeroDivisionError(f"{url} pass@word ?b=1&X-Amz-Signature=0123456789abcdef")

    monkeypatch.setattr(redact, "_known", set())
    monkeypatch.setattr("shardfs.vfs.tree.open_tree", fail)
    monkeypatch.setenv("SHARDFS_DEBUG", "1")
    assert run(["ls", url]) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told
    for secret in ("pass%40word", "pass@word", "0123456789abcdef"):
        assert secret not in told
