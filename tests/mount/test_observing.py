"""What a mount tells of itself: the hidden directory, `shardfs status`, metrics, logs, signals."""

from __future__ import annotations

import errno
import http.client
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.daemon import asking, logs, status_server
from shardfs.daemon.asking import PATIENCE_S
from shardfs.daemon.logs import Logs
from shardfs.daemon.status_server import StatusServer
from shardfs.model import redact
from shardfs.model.errors import MountError
from shardfs.storage.counters import BOUNDS_S, Histogram
from tests.conftest import daemon_pid
from tests.mount.processes import stopped
from tests.mount.programs import attempt, copy_tree, errno_of, run, shardfs, status
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.datasets import Dataset

    Get = Callable[[str, str], Dataset]

fuse = pytest.mark.fuse


@pytest.fixture
def source(dataset: Get) -> Path:
    return dataset("zarr3", "zarr_python").path


def cat(path: Path) -> str:
    """In another process: it might hang."""
    return run("cat", path, timeout=60)


def touch(path: Path) -> None:
    """Read a chunk, likewise."""
    run("md5sum", path, timeout=60)


def told(mount: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(cat(mount / ".shardfs/status.json"))
    return status


@fuse
def test_the_status_of_a_profile(source: Path, mounted: Mounted, tmp_path: Path) -> None:
    config = tmp_path / "x.toml"
    with mounted(source) as mount:
        config.write_text(f'[mount.brain]\nsource = "{source}"\nmountpoint = "{mount}"\n')
        os.environ["SHARDFS_CONFIG"] = str(config)
        try:
            completed = status("brain")
        finally:
            del os.environ["SHARDFS_CONFIG"]
        assert (completed.returncode, completed.stdout.startswith(f"{mount}: {source}\n")) == (0, True), completed


@fuse
def test_doctor_finds_nothing_wrong_with_a_profile_that_is_mounted(
    source: Path, mounted: Mounted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its daemon has the address for metrics, and the lock of the source."""
    copy = copy_tree(source, tmp_path / "source")
    config = tmp_path / "x.toml"
    with mounted(copy, "--rw", "-o", f"metrics_addr=127.0.0.1:0,journal={tmp_path}/journals") as mount:
        address = told(mount)["metrics_addr"]
        config.write_text(
            f'[mount.brain]\nsource = "{copy}"\nmountpoint = "{mount}"\nwritable = true\n'
            f'metrics_addr = "{address}"\njournal = "{tmp_path}/journals"\n'
        )
        monkeypatch.setenv("SHARDFS_CONFIG", str(config))
        for words in (["brain"], [copy, "-o", "profile=brain"]):
            completed = shardfs("doctor", "--json", *words)
            findings = [json.loads(line) for line in completed.stdout.splitlines()]
            mine = [finding for finding in findings if finding["check"] in ("options", "store", "dataset", "writing")]
            assert {finding["check"]: finding["state"] for finding in mine} == {"store": "ok", "dataset": "ok"}, (
                mine,
                completed,
            )


@fuse
def test_answers_that_are_no_failures_are_not_shown_as_errors(source: Path, mounted: Mounted) -> None:
    with mounted(source) as mount:
        assert errno_of((mount / "c/9/9/9").stat) == errno.ENOENT
        assert attempt("getfattr", "-n", "user.nothing", mount).returncode != 0
        assert told(mount)["errors"]
        assert "errors of" not in status(mount).stdout


# ------------------------------------------------------------------------------------------ the hidden directory


@fuse
def test_the_directory_is_there_and_not_listed(source: Path, mounted: Mounted) -> None:
    with mounted(source) as mount:
        assert ".shardfs" not in os.listdir(mount)
        assert sorted(os.listdir(mount / ".shardfs")) == ["log", "metrics", "status.json"]
        assert run("find", mount / ".shardfs", "-type", "f").count("\n") == 3
        assert errno_of((mount / ".shardfs/other").stat) == errno.ENOENT
        assert errno_of((mount / "c/.shardfs").stat) == errno.ENOENT
        assert os.listxattr(mount / ".shardfs") == []


@fuse
def test_who_opens_a_file_sees_one_state_of_it_and_the_next_one_another(source: Path, mounted: Mounted) -> None:
    with mounted(source) as mount:
        first, name = told(mount), mount / ".shardfs/status.json"
        for chunk in ("c/0/0/0", "c/1/0/0"):
            touch(mount / chunk)
        second = told(mount)
        assert second["requests"]["lookup"] > first["requests"]["lookup"]
        assert second["bytes_served"] > first["bytes_served"]
        assert second["uptime"] > first["uptime"]
        with name.open("rb") as file:
            size, data = os.fstat(file.fileno()).st_size, file.read()
            assert len(data) == size
            for chunk in ("c/2/0/0", "c/3/0/0"):
                touch(mount / chunk)
            file.seek(0)
            assert file.read() == data
        assert json.loads(data)["uptime"] < told(mount)["uptime"]


@fuse
def test_more_old_states_than_are_kept(source: Path, mounted: Mounted) -> None:
    with mounted(source) as mount:
        for _ in range(200):
            assert (mount / ".shardfs/metrics").read_bytes()


@fuse
@pytest.mark.parametrize("words", ["direct_io", "threads=1", "attr_timeout=0,entry_timeout=0", "poll_us=100"])
def test_it_is_there_whatever_the_options_are(words: str, source: Path, mounted: Mounted) -> None:
    with mounted(source, "-o", words) as mount:
        assert told(mount)["pid"] == daemon_pid(mount)


@fuse
def test_what_is_counted(source: Path, mounted: Mounted) -> None:
    with mounted(source) as mount:
        before = told(mount)
        assert (before["source"], before["mountpoint"], before["layout"]) == (str(source), str(mount), "native")
        for _ in range(3):
            assert errno_of((mount / "c/9/9/9").stat) == errno.ENOENT
        size = len((mount / "c/0/0/0").read_bytes())
        assert attempt("getfattr", "-n", "user.nothing", mount).returncode != 0
        after = told(mount)
    assert after["bytes_served"] - before["bytes_served"] >= size
    assert after["requests"]["read"] > before["requests"].get("read", 0)
    assert after["errors"]["lookup"]["ENOENT"] >= 1
    assert after["errors"]["getxattr"]["ENODATA"] == 1
    assert after["caches"]["index"]["misses"] >= 1
    assert after["store"] is None
    assert after["threads"] <= 16


@fuse
def test_what_is_counted_of_a_store(source: Path, mounted: Mounted, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "x"), "zip", source)
    with mounted(f"zip://::{archive}") as mount:
        touch(mount / "c/0/0/0")
        store = told(mount)["store"]
    assert store["requests"]["read"] >= 2
    assert store["bytes_fetched"] > 100
    assert (store["timeouts"], store["silent"], store["waiting"]) == (0, False, 0)
    assert store["latency"]["count"] == sum(store["requests"].values())


# ------------------------------------------------------------------------------------------------------ status


def statuses(completed: subprocess.CompletedProcess[str]) -> tuple[int, list[dict[str, Any]]]:
    return completed.returncode, [json.loads(line) for line in completed.stdout.splitlines()]


@fuse
def test_status(source: Path, mounted: Mounted) -> None:
    with mounted(source) as mount:
        touch(mount / "c/0/0/0")
        code, (report,) = statuses(status("--json", mount))
        assert code == 0
        assert (report["state"], report["source"], report["pid"]) == ("answers", str(source), daemon_pid(mount))
        assert any(f["mountpoint"] == str(mount) for f in statuses(shardfs("status", "--json"))[1])
        text = status(mount).stdout
        assert text.startswith(f"{mount}: {source}\n  layout native, process {report['pid']}, up ")
        assert "requests: lookup " in text
    completed = shardfs("status", mount)
    why = "is not mounted by shardfs, and is no dataset with a journal; `shardfs status` lists the mounts"
    assert (completed.returncode, completed.stdout) == (5, f"{mount}: {why}\n")


@fuse
def test_status_tells_what_a_written_byte_costs_once_there_is_one(
    source: Path, mounted: Mounted, tmp_path: Path
) -> None:
    with mounted(source, "--rw", "-o", f"journal={tmp_path / 'journals'}") as mount:
        chunk = mount / "c/0/0/0"
        data = chunk.read_bytes()
        assert "written: 0 B; published: 0 B in 0 shards\n" in status(mount).stdout
        chunk.unlink()
        assert shardfs("flush", mount).returncode == 0
        text = status(mount).stdout
        assert "written: 0 B; published: " in text
        assert " in 1 shard\n" in text
        chunk.write_bytes(data)
        assert shardfs("flush", mount).returncode == 0
        assert " bytes for each\n" in status(mount).stdout


def test_nothing_is_mounted_has_one_exit_code(source: Path, tmp_path: Path) -> None:
    """Also for a directory with files, which could be a source; the exit code 0 of `status` means: all is published."""
    (tmp_path / "notes.txt").write_text("x")
    for verb in ("status", "umount", "flush"):
        completed = shardfs(verb, tmp_path)
        assert (completed.returncode, "`shardfs status` lists the mounts" in completed.stdout + completed.stderr) == (
            5,
            True,
        ), completed
    assert shardfs("recover", tmp_path).returncode == 3
    for verb in ("status", "recover"):
        assert shardfs(verb, source).returncode == 0


@fuse
def test_a_mount_that_goes_away_while_it_is_asked_is_not_listed(
    source: Path, mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = asking._started

    def after_umount(program: str, mountpoint: str, *more: Any, **options: Any) -> subprocess.Popen[bytes]:
        if mountpoint == str(mount):
            assert shardfs("umount", mount).returncode == 0
        return started(program, mountpoint, *more, **options)

    with mounted(source) as mount:
        monkeypatch.setattr(asking, "_started", after_umount)
        assert asking.mounts(str(mount)) == []


@fuse
def test_status_of_a_mount_that_hangs_and_of_a_dead_one(source: Path, mounted: Mounted) -> None:
    with mounted(source) as mount:
        pid = daemon_pid(mount)
        with stopped(pid):
            start_s = time.monotonic()
            code, (report,) = statuses(shardfs("status", "--json", mount))
            seconds = time.monotonic() - start_s
        assert (code, report["state"]) == (1, "hangs")
        assert seconds < PATIENCE_S + 30  # the rest is for Python on a busy machine
        assert PATIENCE_S < 1
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while errno_of(lambda: os.getxattr(mount, "user.shardfs.pid")) != errno.ENOTCONN:
            assert time.monotonic() < end
        code, (report,) = statuses(status("--json", mount))
        assert (code, report["state"]) == (1, "dead")
        assert f"; shardfs umount --lazy {mount}\n" in status(mount).stdout
        assert shardfs("umount", "--lazy", mount).returncode == 0


# ----------------------------------------------------------------------------------------------------- metrics


METRIC = re.compile(r'shardfs_[a-z_]+(\{[a-z]+="(\\.|[^"\\])*"(,[a-z]+="(\\.|[^"\\])*")*\})? [-+.e0-9]+')


def parsed(text: str) -> dict[str, float]:
    metrics, declared = {}, set()
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            declared.add(line.split()[2])
        elif not line.startswith("# HELP "):
            assert METRIC.fullmatch(line), line
            name, _, value = line.rpartition(" ")
            metrics[name] = float(value)
            base = re.sub(r"(_bucket|_sum|_count)?(\{.*)?$", "", name)
            assert base in declared or name.partition("{")[0] in declared, line
    return metrics


@fuse
def test_metrics(source: Path, mounted: Mounted) -> None:
    with mounted(source, "-o", "metrics_addr=127.0.0.1:0") as mount:
        touch(mount / "c/0/0/0")
        for number in range(100):  # of which at least one is timed
            assert errno_of((mount / f"missing{number}").stat) == errno.ENOENT
        metrics = parsed(cat(mount / ".shardfs/metrics"))
        address = told(mount)["metrics_addr"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=250) as reply:
            assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            scraped = parsed(reply.read().decode())
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{address}/other", timeout=60)
    assert metrics['shardfs_requests_total{op="lookup"}'] >= 100
    assert metrics['shardfs_request_seconds_bucket{op="lookup",le="+Inf"}'] >= 64
    assert metrics["shardfs_bytes_served_total"] > 0
    assert scraped.keys() >= metrics.keys() - {k for k in metrics if "errno" in k}


@fuse
def test_an_address_that_is_taken(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mnt").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        completed = shardfs("mount", source, tmp_path / "mnt", "--metrics-addr", address)
        assert (completed.returncode, "Address already in use" in completed.stderr) == (5, True), completed.stderr
        with pytest.raises(MountError, match="in use"):
            StatusServer(address)


@pytest.fixture
def server() -> tuple[str, int]:
    status_server = StatusServer("127.0.0.1:0")
    status_server.start(lambda: b"")
    host, _, port = status_server.address.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("page", ["/", "/metrics", "/mounts.json"])
def test_a_page_of_another_site_reads_nothing(server: tuple[str, int], page: str) -> None:
    """DNS rebinding: the browser sends the name of that site to the address of this machine."""
    mine = socket.gethostname()
    names = {"evil.example": 421, "evil.example:80": 421, "localhost.evil.example": 421, "127.0.0.1.evil.example": 421}
    names |= {"": 421, "[::1": 421, "localhost": 200, "LOCALHOST:9100": 200, "127.0.0.1": 200, "10.1.2.3:9100": 200}
    names |= {"[fe80::1]:9100": 200, mine: 200}
    for name, code in names.items():
        connection = http.client.HTTPConnection(*server, timeout=250)
        connection.request("GET", page, headers={"Host": name})
        with connection.getresponse() as answer:
            assert answer.status == code, name
            answer.read()
        connection.close()


def test_the_host_of_the_address_is_a_name_of_the_server() -> None:
    server = StatusServer("127.1:0")  # another text for 127.0.0.1, which is no IP address to a browser
    server.start(lambda: b"")
    request = urllib.request.Request(f"http://{server.address}/metrics", headers={"Host": "127.1"})
    with urllib.request.urlopen(request, timeout=250) as answer:
        assert answer.status == 200


def test_slow_clients_keep_no_threads(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_server, "LONGEST_S", 1.0)
    slow = [socket.create_connection(server, timeout=60) for _ in range(status_server.MOST_CONNECTIONS + 5)]
    try:
        for connection in slow:
            with suppress(OSError):  # refused already
                connection.sendall(b"GET /metrics HTTP/1.0\r\n")
        handlers = [t for t in threading.enumerate() if "process_request_thread" in t.name]
        assert len(handlers) <= status_server.MOST_CONNECTIONS

        def closed(connection: socket.socket) -> bool:
            """Whether the server has closed it, although it gets a byte of a header again and again."""
            try:
                connection.sendall(b"a")
                return connection.recv(1, socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                return False
            except OSError:
                return True

        wait_until(lambda: all(map(closed, slow)))
    finally:
        for connection in slow:
            connection.close()
    with urllib.request.urlopen(f"http://{server[0]}:{server[1]}/metrics", timeout=250) as answer:
        assert answer.status == 200


class Stuck:
    """A process that waits for a mount and cannot be killed."""

    stdout, ended = None, False

    def communicate(self, timeout: float) -> None:
        raise subprocess.TimeoutExpired("ask", timeout)

    def kill(self) -> None:
        pass

    def poll(self) -> int | None:
        return 0 if self.ended else None


@fuse
def test_a_mount_that_hangs_is_asked_by_one_process(
    source: Path, mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, stuck = asking._started, list[Stuck]()

    def stick(program: str, mountpoint: str, *more: Any, **options: Any) -> Any:
        stuck.append(Stuck())
        return stuck[-1]

    with mounted(source) as mount, mounted(source) as other:
        monkeypatch.setattr(asking, "_started", stick)
        for _ in range(5):
            assert [m.state for m in asking.mounts(str(mount))] == ["hangs"]
        assert len(stuck) == 1
        monkeypatch.setattr(asking, "_started", started)
        monkeypatch.setattr(asking, "PATIENCE_S", 30)
        assert [m.state for m in asking.mounts(str(mount))] == ["hangs"]
        assert [m.state for m in asking.mounts(str(other))] == ["answers"]
        stuck[0].ended = True
        assert [m.state for m in asking.mounts(str(mount))] == ["answers"]


def test_a_histogram_has_every_duration_in_its_bin() -> None:
    times = Histogram()
    for bound in BOUNDS_S:
        times.add(bound * 0.9)
    times.add(1e6, 3)
    assert times.bins == [1] * len(BOUNDS_S) + [3]
    assert times.below(0.5) == BOUNDS_S[8]
    assert times.below(0.99) == float("inf")


@fuse
@pytest.mark.parametrize("words", ["ro", "writable"])
def test_files_of_the_hidden_directory_can_be_copied(
    source: Path, mounted: Mounted, tmp_path: Path, words: str
) -> None:
    with mounted(source, "-o", words) as mount:
        names = ["log", "metrics", "status.json"]
        run("cp", *(mount / ".shardfs" / name for name in names), tmp_path, timeout=60)
        assert b"shardfs_info" in (tmp_path / "metrics").read_bytes()
        numbers = [run("stat", "-c", "%i", mount / ".shardfs" / name, timeout=60) for name in [*names, *names]]
        assert numbers[:3] == numbers[3:]
        assert len({*numbers, run("stat", "-c", "%i", mount / ".shardfs", timeout=60)}) == 4


# -------------------------------------------------------------------------------------------------------- logs


@fuse
def test_signals_change_the_log_and_tell_what_threads_do(source: Path, mounted: Mounted, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with mounted(source, "-o", f"log_file={log},log_format=json") as mount:
        pid = daemon_pid(mount)
        for level in ("info", "debug", "warning"):
            os.kill(pid, signal.SIGUSR2)
            wanted = f"the log level is {level} now"
            wait_until(partial(_is_logged, wanted, mount))
        os.kill(pid, signal.SIGUSR1)
        wait_until(lambda: "stacks of all threads" in log.read_text())
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert "in lead" in lines[-1]["message"]
        assert "MainThread" in lines[-1]["message"]
        assert {line["level"] for line in lines} == {"warning"}
        assert [json.loads(line)["message"] for line in cat(mount / ".shardfs/log").splitlines()] == [
            line["message"] for line in lines
        ]


def _is_logged(wanted: str, mount: Path) -> bool:
    return wanted in cat(mount / ".shardfs/log")


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield root
    for handler in root.handlers:
        if handler not in before[0]:
            handler.close()
    root.handlers[:], root.level = before[0], before[1]


def test_a_log_that_was_rotated_is_begun_anew(root_logger: logging.Logger, tmp_path: Path) -> None:
    log = tmp_path / "log"
    logs.set_up(Logs(file=str(log)), daemon=True)
    root_logger.error("one")
    log.rename(tmp_path / "log.1")
    root_logger.error("two")
    assert log.read_text().endswith("ERROR two\n")


def test_a_log_that_cannot_be_begun_anew_fails_nobody(
    root_logger: logging.Logger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where only root may make files. A thread that answers requests would end by it, and the mount hang."""
    directory = tmp_path / "logs"
    directory.mkdir()
    logs.set_up(Logs(file=str(directory / "log")), daemon=True)
    directory.rename(tmp_path / "away")
    root_logger.error("two")
    assert "Message: 'two'" in capsys.readouterr().err
    directory.mkdir()
    root_logger.error("three")
    assert (directory / "log").read_text().endswith("ERROR three\n")


def test_lines_for_the_journal_have_priorities(
    root_logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "stderr").open("w+") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        info = os.fstat(stderr.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{info.st_dev}:{info.st_ino}")
        logs.set_up(Logs(level="debug"), daemon=False)
        root_logger.error("two\nlines")
        root_logger.info("told")
        monkeypatch.setenv("JOURNAL_STREAM", "1:1")
        logs.set_up(Logs(level="debug"), daemon=False)
        root_logger.info("no journal")
        stderr.seek(0)
        assert stderr.read() == f"<3>two\\nlines\n<6>told\nshardfs[{os.getpid()}]: no journal\n"


def test_json_lines_are_without_secrets(root_logger: logging.Logger, tmp_path: Path) -> None:
    redact.add_secrets("", {"password": "opensesame"})
    tail = logs.set_up(Logs(str(tmp_path / "log"), "info", "json"), daemon=True)
    try:
        raise ValueError("it was opensesame")
    except ValueError:
        root_logger.exception("opensesame %d", 5)
    line = json.loads((tmp_path / "log").read_text())
    assert (line["level"], line["message"], line["logger"]) == ("error", "*** 5", "root")
    assert "it was ***" in line["traceback"]
    assert json.loads(tail.text()) == line


@fuse
def test_the_access_log(source: Path, mounted: Mounted, tmp_path: Path) -> None:
    log = tmp_path / "access"
    with mounted(source, "-o", f"access_log={log}") as mount:
        size = len((mount / "c/0/0/0").read_bytes())
        assert errno_of((mount / "c/0/0/9").stat) == errno.ENOENT
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (read,) = [line for line in lines if line["op"] == "read" and line["path"] == "c/0/0/0"]
    assert (read["offset"], read["errno"], read["bytes"]) == (0, 0, size)
    assert read["seconds"] < 10
    looked = [line for line in lines if line["op"] == "lookup"]
    assert {"path": "c/0/0", "name": "9", "errno": errno.ENOENT}.items() <= looked[-1].items()
    assert all(line["uid"] == os.getuid() for line in looked)
    assert oct(log.stat().st_mode) == "0o100600"
