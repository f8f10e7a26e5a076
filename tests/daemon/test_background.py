"""The one report of a daemon to the program that started it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardfs.daemon.background import Report, await_report
from shardfs.model.exit_codes import ExitCode

if TYPE_CHECKING:
    from pathlib import Path


def test_a_daemon_reports_once_and_keeps_no_number_of_a_closed_descriptor(tmp_path: Path) -> None:
    receive, send = os.pipe()
    with open(receive, closefd=True), os.fdopen(send, "w") as pipe:
        Report(ExitCode.OK, "warning: damage").send(pipe)
        file = os.open(tmp_path / "segment", os.O_WRONLY | os.O_CREAT)
        assert file == send, "the number of the pipe is used again"
        Report(ExitCode.PROBLEM, "fails later").send(pipe)
        os.close(file)
        assert await_report(receive, 60) == Report(ExitCode.OK, "warning: damage")
    assert (tmp_path / "segment").read_bytes() == b""


def test_a_daemon_that_says_nothing() -> None:
    receive, send = os.pipe()
    with open(receive, closefd=True):
        assert await_report(receive, 0) is None
        os.close(send)
        report = await_report(receive, 60)
    assert report is not None
    assert (report.code, "without a message" in report.text) == (ExitCode.PROBLEM, True)
