"""Fixtures: datasets written once per session, clients in processes of their own, and real mounts.

A test must never wait on its own mount for ever: every command has a time-out, a watchdog ends the daemon of a mount
that is held too long (reads on it then fail instead of hanging), and a mount left behind fails the test that left it.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from tests import data_precomputed_ids, datasets, forking
from tests.datasets import ROOT, Array, Client, Dataset
from tests.datasets import client_python as client_python  # for tests to import from here
from tests.sampling import sampled
from tests.write.scale import times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.data_precomputed_ids import IdDataset

# Examples run beside other processes on few cores: neither an example nor its making is too slow by itself. A suite's
# tests are meant to be inherited by several classes. The quick run has the same examples each time, so that no
# change is blamed for what chance has found; SHARDFS_TORTURE multiplies them, and looks for new ones.
# Not in tests/__init__.py: clients run under virtualenvs that have no Hypothesis.
settings.register_profile(
    "shardfs",
    deadline=None,
    derandomize=times() == 1,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
    max_examples=30 * times(),
)
settings.load_profile("shardfs")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or no program that is tested could be interrupted

MOUNT_SECONDS = 200.0
CLIENT_SECONDS = 250.0
HELD_SECONDS = 250.0  # below the time-out of a test, so that a hang ends as a failed test


# ----------------------------------------------------------------------------------------------- processes


def _run(command: Sequence[str | Path], timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command and give up on it after `timeout`, even if it hangs in a file system and cannot be killed.

    `subprocess.run` would wait for the killed process. Output goes to a file: a daemon that the command leaves behind
    would keep a pipe open.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = forking.run(command, timeout, out, err, **options)
        if code is None:
            code = _run_anew(command, timeout, stdout=out, stderr=err, **options)
        out.seek(0)
        err.seek(0)
        text = err.read()
        if code == -signal.SIGALRM:
            text += f"\nno end within {timeout:g} s"
        return subprocess.CompletedProcess(command, code, out.read(), text)


def _run_anew(command: Sequence[str | Path], timeout: float, **options: Any) -> int:
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **options)
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(2)
        return -signal.SIGALRM


class ClientError(Exception):
    """A client could not read; `error` and `message` are those of the exception it met."""

    def __init__(self, script: str, run: subprocess.CompletedProcess[str]) -> None:
        line = run.stdout.strip().rsplit("\n", 1)[-1]
        try:
            told = json.loads(line)
        except json.JSONDecodeError:
            told = {"error": f"status {run.returncode}", "message": line}
        self.error = str(told["error"])
        self.message = str(told["message"])
        super().__init__(f"{script}: {self.error}: {self.message}\n{run.stderr}")


def run_client(
    script: str,
    *args: str | Path,
    python: str | Path = sys.executable,
    timeout: float = CLIENT_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Run `tests/clients/<script>.py` with `python`; ClientError if it fails or takes too long."""
    command = [python, "-m", f"tests.clients.{script}", *map(str, args)]
    run = _run(command, timeout, cwd=ROOT)
    if run.returncode:
        raise ClientError(script, run)
    return run


def read_with(client: Client, dataset: Dataset, path: Path, member: str | None = None) -> Array:
    """What `client` reads from the tree at `path`: the dataset itself, its twin or a mount of it."""
    name = next(iter(dataset.arrays)) if member is None else member
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "out.npy")
        if client == "cloudvolume":
            missing = ["--fill-missing"] if dataset.fill_missing else []
            run_client("read_cloudvolume", path, out, "--mip", name, *missing, python=client_python("cv"))
        elif client == "tensorstore" and dataset.format == "precomputed":
            run_client("read_tensorstore", "neuroglancer_precomputed", path, out, "--scale", name)
        elif client == "tensorstore":
            run_client("read_tensorstore", "zarr3", path / name, out)
        else:
            run_client(f"read_{client}", path, out, "--member", name)
        array: Array = np.load(out)
        return array


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whatever mounts is marked so, before `-m` chooses. Unless SHARDFS_TORTURE is set, what takes hours is left out.

    And of many cases only some are tried, unless the command line names a test.
    """
    for item in items:
        if {"mounted", "fuse_requests"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.fuse)
    if "SHARDFS_TORTURE" in os.environ:
        return
    quick = [item for item in items if item.get_closest_marker("torture") is None]
    if not (config.option.keyword or any("::" in argument for argument in config.args)):
        chosen = sampled(quick)
        quick = [item for item in quick if item.nodeid in chosen]
    tried = set(quick)
    config.hook.pytest_deselected(items=[item for item in items if item not in tried])
    items[:] = quick


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("fuse"):
        need_fuse()


# ------------------------------------------------------------------------------------------------ datasets


class WrittenOnce:
    """Datasets that all workers of a test run share: the first that needs one writes it. Nobody else writes to it."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        self.directory = directory
        self.here: dict[str, Any] = {}

    def get(self, name: str, write: Callable[[Path], Any]) -> Any:
        """What `write` returned for the directory of this name."""
        if name not in self.here:
            root, pickled = self.directory / name, self.directory / f"{name}.pickle"
            with (self.directory / f"{name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not pickled.exists():
                    shutil.rmtree(root, ignore_errors=True)  # of a worker that was killed
                    root.mkdir()
                    pickled.with_suffix(".new").write_bytes(pickle.dumps(write(root)))
                    pickled.with_suffix(".new").rename(pickled)
                self.here[name] = pickle.loads(pickled.read_bytes())
        return self.here[name]


@pytest.fixture(scope="session")
def written_once(tmp_path_factory: pytest.TempPathFactory) -> WrittenOnce:
    base = tmp_path_factory.getbasetemp()
    return WrittenOnce((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "datasets")


@pytest.fixture(scope="session")
def dataset(written_once: WrittenOnce) -> Callable[[str, str], Dataset]:
    """`dataset("zarr3", "nested")`: written on first use, shared by the session, not to be written to."""
    registries = {"zarr3": datasets.ZARR3, "precomputed": datasets.PRECOMPUTED}
    return lambda kind, name: written_once.get(f"{kind}-{name}", registries[kind][name])


@pytest.fixture(scope="session")
def id_dataset(written_once: WrittenOnce) -> Callable[[str], IdDataset]:
    """The same for meshes, skeletons and annotations, by name."""
    return lambda name: written_once.get(f"ids-{name}", data_precomputed_ids.DATASETS[name])


@pytest.fixture(params=sorted(datasets.ZARR3))
def zarr3_dataset(request: pytest.FixtureRequest, dataset: Callable[[str, str], Dataset]) -> Dataset:
    """Each Zarr variant in turn."""
    return dataset("zarr3", request.param)


@pytest.fixture(params=sorted(datasets.PRECOMPUTED))
def precomputed_dataset(request: pytest.FixtureRequest, dataset: Callable[[str, str], Dataset]) -> Dataset:
    """Each precomputed variant in turn."""
    return dataset("precomputed", request.param)


# -------------------------------------------------------------------------------------------------- mounts


@dataclass(frozen=True)
class MountEntry:
    """A line of /proc/self/mountinfo; reading it asks nothing of the mounted file system."""

    path: Path
    major: int
    minor: int
    fstype: str


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def mount_entries() -> list[MountEntry]:
    entries = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        words = before.split(" ")
        major, minor = words[2].split(":")
        entries.append(MountEntry(Path(_unescape(words[4])), int(major), int(minor), after.split(" ")[0]))
    return entries


def mount_entry(path: Path) -> MountEntry | None:
    """The topmost mount on `path`."""
    entries = [entry for entry in mount_entries() if entry.path == path]
    return entries[-1] if entries else None


class MountFailed(Exception):
    """`shardfs mount` gave an error; `returncode` and `stderr` are what it left."""

    def __init__(self, run: subprocess.CompletedProcess[str]) -> None:
        self.returncode = run.returncode
        self.stderr = run.stderr
        super().__init__(f"shardfs mount: status {run.returncode}\n{run.stdout}{run.stderr}")


def _start_time(pid: int) -> str | None:
    """What tells a process from a later one with its number; None when it is gone or a zombie.

    As long as one of its threads is there it has all its files, locks and mounts, even if the first one has ended.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ended = fields[0] in "ZX" and len(os.listdir(f"/proc/{pid}/task")) <= 1
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if ended else fields[19]


def daemon_pid(mountpoint: Path) -> int:
    """The process that serves a mount, as the mount itself tells; asked in a process that may hang."""
    ask = "import os, sys; print(os.getxattr(sys.argv[1], 'user.shardfs.pid').decode())"
    run = _run([sys.executable, "-IS", "-c", ask, mountpoint], 10)
    if run.returncode:
        raise AssertionError(f"{mountpoint} does not tell user.shardfs.pid: {run.stderr}")
    return int(run.stdout)


def _wait_gone(pid: int, started: str | None, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while started is not None and _start_time(pid) == started:
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _kill(pid: int, started: str | None) -> None:
    if started is not None and _start_time(pid) == started:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def unmount(mountpoint: Path) -> None:
    """`fusermount3 -u`, tried again while the mount is busy for a moment, at last lazily."""
    run = None
    for _ in range(20):
        if mount_entry(mountpoint) is None:
            return
        run = _run(["fusermount3", "-u", mountpoint], 10)
        if run.returncode:
            time.sleep(0.1)
    _run(["fusermount3", "-uz", mountpoint], 10)
    if mount_entry(mountpoint) is not None:
        raise AssertionError(f"{mountpoint} cannot be unmounted: {run.stderr if run else ''}")


def need_fuse() -> None:
    """Skip the test where nothing can be mounted."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no /dev/fuse")
    if shutil.which("fusermount3") is None:
        pytest.skip("no fusermount3")


class Mounted(Protocol):
    """`with mounted(source, "--layout", "native") as path:`."""

    def __call__(
        self, source: str | Path, *cli_args: str, env: dict[str, str] | None = None
    ) -> AbstractContextManager[Path]: ...


@contextmanager
def _mounted(
    mountpoint: Path, source: str | Path, cli_args: Sequence[str], env: dict[str, str] | None
) -> Iterator[Path]:
    mountpoint.mkdir()
    command = [sys.executable, "-m", "shardfs", "mount", str(source), str(mountpoint), *cli_args]
    run = _run(command, MOUNT_SECONDS, cwd=ROOT, env={**os.environ, **(env or {})})
    if run.returncode:
        unmount(mountpoint)
        mountpoint.rmdir()
        raise MountFailed(run)
    try:
        pid = daemon_pid(mountpoint)
    except BaseException:
        unmount(mountpoint)
        raise
    started = _start_time(pid)
    watchdog = threading.Timer(HELD_SECONDS, _kill, (pid, started))
    watchdog.daemon = True
    watchdog.start()
    try:
        yield mountpoint
    finally:
        watchdog.cancel()
        _end_mount(mountpoint, pid, started)


def _end_mount(mountpoint: Path, pid: int, started: str | None) -> None:
    try:
        unmount(mountpoint)
        if not _wait_gone(pid, started, 30):
            raise AssertionError(f"the daemon {pid} of {mountpoint} outlives its mount; is a file on it still open?")
    finally:
        _kill(pid, started)
    mountpoint.rmdir()


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    """Mount a source for the length of a `with` block with `shardfs mount`, in a daemon as users have it."""
    need_fuse()
    numbers = count()

    def mount(source: str | Path, *cli_args: str, env: dict[str, str] | None = None) -> AbstractContextManager[Path]:
        return _mounted(tmp_path / f"mnt{next(numbers)}", source, cli_args, env)

    return mount


@pytest.fixture(autouse=True)
def no_mount_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves a mount; only this session's directory counts, for others may run beside it."""
    base = tmp_path_factory.getbasetemp()
    before = {entry.path for entry in mount_entries()}  # those of fixtures that outlive the test
    yield
    paths = [entry.path for entry in mount_entries() if entry.path.is_relative_to(base) and entry.path not in before]
    for path in reversed(paths):
        _run(["fusermount3", "-uz", path], 10)
    if paths:
        pytest.fail(f"mounts left behind: {', '.join(map(str, paths))}")


# ------------------------------------------------------------------------------------------- FUSE requests


class FuseRequests(Protocol):
    """`with fuse_requests(path) as counts:`; the counts are there when the block is left."""

    def __call__(self, mount_path: Path) -> AbstractContextManager[Counter[str]]: ...


_INSTANCES = count()
_REQUEST = re.compile(r"fuse_request_send: .*\(FUSE_(\w+)\)")


@contextmanager
def _tracefs() -> Iterator[Path]:
    """tracefs, mounted for us alone: where it usually is another test run may be unmounting it."""
    if os.geteuid() != 0:
        pytest.skip("counting FUSE requests needs root")
    directory = Path(tempfile.mkdtemp(prefix="tracefs-"))
    try:
        if _run(["mount", "-t", "tracefs", "tracefs", directory], 10).returncode:
            pytest.skip("tracefs cannot be mounted")
        try:
            if not (directory / "events/fuse/fuse_request_send").is_dir():
                pytest.skip("the kernel has no tracepoint for FUSE requests")
            yield directory
        finally:
            _run(["umount", directory], 10)
    finally:
        directory.rmdir()


def _lost(instance: Path) -> int:
    """Events that did not fit into the buffers."""
    stats = (path.read_text() for path in instance.glob("per_cpu/cpu*/stats"))
    return sum(int(number) for text in stats for number in re.findall(r"(?:overrun|dropped events): (\d+)", text))


@contextmanager
def _fuse_requests(mount_path: Path) -> Iterator[Counter[str]]:
    entry = mount_entry(mount_path)
    if entry is None:
        raise AssertionError(f"{mount_path} is not a mountpoint")
    counts: Counter[str] = Counter()
    with _tracefs() as root:
        # An instance has buffers and filters of its own, so concurrent tests do not disturb each other.
        instance = root / "instances" / f"shardfs-{os.getpid()}-{next(_INSTANCES)}"
        instance.mkdir()
        try:
            event = instance / "events/fuse/fuse_request_send"
            (instance / "buffer_size_kb").write_text("8192")
            # The kernel packs a device number as major << 20 | minor.
            (event / "filter").write_text(f"connection == {entry.major << 20 | entry.minor}")
            (event / "enable").write_text("1")
            try:
                yield counts
            finally:
                (event / "enable").write_text("0")
            counts.update(_REQUEST.findall((instance / "trace").read_text()))
            if lost := _lost(instance):
                raise AssertionError(f"{lost} FUSE requests were not counted")
        finally:
            instance.rmdir()


@pytest.fixture
def fuse_requests() -> FuseRequests:
    """Count the requests that the kernel sends for one mount, by name: LOOKUP, READ, ... (FORGET is not traced)."""
    return _fuse_requests
