"""A program has a mount for the length of `with shardfs.mounted(source) as path:`, and no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import shardfs
from shardfs.daemon import context
from shardfs.model.errors import MountError, NotADatasetError
from tests.conftest import daemon_pid, mount_entries, mount_entry
from tests.datasets import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.datasets import Dataset

    Get = Callable[[str, str], Dataset]

pytestmark = pytest.mark.fuse


@pytest.fixture
def source(dataset: Get) -> Path:
    return dataset("zarr3", "default").path


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary directories are made; nothing may be left there."""
    path = tmp_path / "tmp"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    monkeypatch.setenv("TMPDIR", str(path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield path
    assert [entry for entry in mount_entries() if entry.path.is_relative_to(path)] == []
    assert os.listdir(path) == []


def test_the_mount_is_there_within_the_block(source: Path) -> None:
    with shardfs.mounted(source) as path:
        assert path.name == source.name
        assert (path / "zarr.json").exists()
        entry = mount_entry(path)
        assert entry is not None
        assert entry.fstype == "fuse.shardfs"
    assert not path.exists()


def test_options_and_storage_options(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFS_UMASK", "077")
    url = f"file://{source}"
    with shardfs.mounted(url, storage_options={"auto_mkdir": False}, uid=7, file_mode="0440", direct_io=True) as path:
        attributes = os.stat(path / "zarr.json")
        assert (attributes.st_uid, oct(attributes.st_mode)) == (7, "0o100400")


def test_two_at_once(source: Path) -> None:
    with shardfs.mounted(source) as one, shardfs.mounted(source) as two:
        assert one != two
        assert (one / "zarr.json").read_bytes() == (two / "zarr.json").read_bytes()


def test_an_exception_passes(source: Path) -> None:
    with pytest.raises(ZeroDivisionError), shardfs.mounted(source) as path:
        raise ZeroDivisionError
    assert mount_entry(path) is None


def test_what_goes_wrong(source: Path, tmp_path: Path, place: Path) -> None:
    (tmp_path / "plain").mkdir()
    cases: list[tuple[type[Exception], str, Path, dict[str, Any]]] = [
        (ValueError, "did you mean 'layout'", source, {"layot": "x"}),
        (ValueError, "'a,b' is not one of", source, {"layout": "a,b"}),
        (ValueError, "allow_other needs default_permissions", source, {"allow_other": True}),
        (OSError, "No such file", tmp_path / "none", {}),
        (NotADatasetError, "no sharded", tmp_path / "plain", {}),
        (TimeoutError, "not ready in time", source, {"ready_timeout": 0.01}),
    ]
    for error, told, path, options in cases:
        with pytest.raises(error, match=told), shardfs.mounted(path, **options):
            pytest.fail("it was mounted")
        assert os.listdir(place) == []
    assert issubclass(MountError, OSError)


def test_what_a_daemon_says_before_it_dies(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_DAEMON", "raise ImportError('a library is out of order')")
    with (
        pytest.raises(OSError, match=r"ended without a message.*Traceback") as failed,
        shardfs.mounted(source),
    ):
        pass
    assert str(failed.value).endswith("a library is out of order")


def test_secrets_are_on_no_command_line(source: Path) -> None:
    url = f"file://me:hunter21@{source}"
    with pytest.raises(OSError, match="No such file") as told, shardfs.mounted(url, storage_options={"k": "hunter22"}):
        pytest.fail("it was mounted")
    assert "hunter" not in str(told.value)
    with shardfs.mounted(f"file://{source}", storage_options={"secret": "hunter22"}) as path:
        assert b"hunter" not in Path(f"/proc/{daemon_pid(path)}/cmdline").read_bytes()


def test_a_file_that_is_open_at_the_end(source: Path) -> None:
    with shardfs.mounted(source) as path:
        file = (path / "zarr.json").open("rb")
        first_byte = file.read(1)
    assert first_byte == b"{"
    assert mount_entry(path) is None
    with suppress(OSError):  # nobody is left to be told
        file.close()


def test_a_daemon_that_was_killed(source: Path) -> None:
    with shardfs.mounted(source) as path:
        os.kill(daemon_pid(path), signal.SIGKILL)


PROGRAM = """
import sys, time
import shardfs
with shardfs.mounted(sys.argv[1]) as path:
    print(path, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_to_the_program(number: signal.Signals, source: Path, place: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert mount_entry(path) is not None
        process.send_signal(number)
        assert process.wait(20) != 0
    stop = time.monotonic() + 100
    while mount_entry(path) is not None or os.listdir(place):  # if it had no time to wait, the daemon does it alone
        assert time.monotonic() < stop
        time.sleep(0.02)


def test_ctrl_c_in_a_terminal_goes_to_the_program_first(source: Path) -> None:
    """The whole group gets it; within the block the mount still answers."""
    before, after = PROGRAM.split("    print(path, flush=True)")
    program = (  # the signal may come as soon as the path is printed
        f"{before}    try:\n        print(path, flush=True){after.replace('    time', '        time')}"
        "    except KeyboardInterrupt:\n        time.sleep(1)\n        print((path / 'zarr.json').exists(), flush=True)"
    )
    command = [sys.executable, "-c", program, str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout.readline() == "True\n"
        assert process.wait(20) == 0


def test_import_is_light() -> None:
    program = "import sys; before = set(sys.modules); import shardfs; print(*(set(sys.modules) - before))"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {name for name in completed.stdout.split() if name.startswith("shardfs")} == {
        "shardfs",
        "shardfs.model",
        "shardfs.model.errors",
        "shardfs.model.exit_codes",
        "shardfs.model.redact",
        "shardfs.model.text",
        "shardfs.model.version",
    }
    assert not set(completed.stdout.split()) & {"numpy", "fsspec", "asyncio", "subprocess", "logging"}
