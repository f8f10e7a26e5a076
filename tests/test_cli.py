"""The command line: what the verbs print, and the exit codes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

from shardfs import __version__, cli
from shardfs.errors import CorruptShardError
from tests import handmade_ids

if TYPE_CHECKING:
    from shardfs.fuse.settings import FuseSettings

zarr = pytest.importorskip("zarr")

VALUES = np.arange(100 * 90, dtype=np.uint16).reshape(100, 90)
VALUES[40:80, 40:80] = 0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("cli") / "x.zarr")
    group = zarr.open_group(path, mode="w")
    how: dict[str, Any] = {"shape": (100, 90), "chunks": (10, 10), "dtype": "u2"}
    group.create_array("deep/sharded", shards=(40, 40), **how)[:] = VALUES
    group.create_array("deep/plain", **how)[:] = VALUES
    return path


@pytest.fixture(autouse=True)
def no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("SHARDFS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")


def shardfs(*args: str, **env: str) -> subprocess.CompletedProcess[bytes]:
    """The real program, in a process of its own."""
    command = [sys.executable, "-m", "shardfs", *args]
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), **env}
    return subprocess.run(command, capture_output=True, timeout=60, env=where, check=False)


def invoke(*args: str) -> str:
    """A verb in this process; it must succeed."""
    result = CliRunner().invoke(cli.commands, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


# ---- what the verbs print ----


def test_ls(source: str) -> None:
    assert invoke("ls", source) == "zarr.json\ndeep\n"
    assert invoke("ls", source, "deep/sharded/c").split() == [str(i) for i in range(10)]
    assert invoke("ls", source, "deep/sharded/c/4").split() == ["0", "1", "2", "3", "8"]
    assert invoke("ls", source, "deep/sharded/c/4/0") == "0\n"


def test_ls_long_shows_sizes(source: str) -> None:
    kind, size, _, _, name = invoke("ls", "-l", source, "deep/sharded/c/0/1").split()
    assert (kind, name) == ("-", "1")
    assert int(size) == os.stat(f"{source}/deep/plain/c/0/1").st_size
    assert invoke("ls", "-l", source, "deep/sharded").splitlines()[-1].startswith("d            0 ")


def test_ls_shows_what_cannot_be_opened_too(source: str, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(f"{source}/deep/sharded", copied)
    (copied / "broken").symlink_to("nowhere")
    lines = {line.split()[-1]: line for line in invoke("ls", "-l", str(copied)).splitlines()}
    assert set(lines) == {"zarr.json", "c", "broken"}
    assert lines["broken"].startswith("-            ? ")
    by_name = {line["name"]: line for line in map(json.loads, invoke("ls", "--json", str(copied)).splitlines())}
    assert by_name["broken"]["size"] is None


def test_ls_as_json_is_one_object_per_line(source: str) -> None:
    lines = [json.loads(line) for line in invoke("ls", "--json", source, "deep/sharded/c/0").splitlines()]
    assert [line["name"] for line in lines] == [str(i) for i in range(9)]
    for line in lines:
        plain = os.stat(f"{source}/deep/plain/c/0/{line['name']}")
        assert (line["type"], line["size"]) == ("file", plain.st_size)
    assert lines[0]["mtime_ns"] == os.stat(f"{source}/deep/sharded/c/0/0").st_mtime_ns


def test_names_break_no_rows_and_steer_no_terminal(source: str, tmp_path: Path) -> None:
    name = os.fsdecode(b"a\nb\x1b[31m\xff")
    shutil.copytree(f"{source}/deep/sharded", tmp_path / name)
    (row,) = shardfs("ls", "-l", str(tmp_path)).stdout.splitlines()
    assert row.endswith(rb" a\nb\x1b[31m\xff")
    assert shardfs("ls", str(tmp_path)).stdout == os.fsencode(name) + b"\n"  # as `ls` does into a pipe
    for verb in ("info", "verify"):
        done = shardfs(verb, str(tmp_path))
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.splitlines()[-1].startswith(rb"a\nb\x1b[31m\xff")
    (told,) = json.loads(shardfs("info", "--json", str(tmp_path)).stdout)["collections"]
    assert told["path"] == name


def test_a_slash_behind_a_path_asks_for_a_directory(source: str) -> None:
    for verb in ("cat", "ls"):
        done = shardfs(verb, source, "zarr.json/")
        assert (done.returncode, done.stderr) == (3, b"shardfs: zarr.json/: Not a directory\n")
    assert invoke("ls", source, "deep/sharded/c/4/") == invoke("ls", source, "deep/sharded/c/4")


def test_a_path_that_exists_is_no_chained_url(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(f"{source}/deep/sharded", tmp_path / "zip::sharded")
    monkeypatch.chdir(tmp_path)
    assert invoke("ls", "zip::sharded") == "zarr.json\nc\n"
    assert invoke("ls", str(tmp_path / "zip::sharded")) == "zarr.json\nc\n"
    done = shardfs("info", "reference://x")  # which wants an option
    assert (done.returncode, done.stderr.count(b"\n")) == (3, 1)
    assert done.stderr.startswith(b"shardfs: reference://x: cannot be opened: ReferenceFileSystem")
    done = shardfs("info", "no::such")
    assert (done.returncode, done.stderr) == (3, b"shardfs: no::such: No such file or directory\n")


def test_cat(source: str) -> None:
    names = ["c/0/0", "c/3/7", "c/9/8"]
    done = shardfs("cat", source, *(f"deep/sharded/{n}" for n in names))
    assert done.stdout == b"".join(Path(source, "deep/plain", n).read_bytes() for n in names)
    assert (done.returncode, done.stderr) == (0, b"")


def test_locate_and_back(source: str) -> None:
    answer = json.loads(invoke("locate", "--json", source, "deep/sharded/c/5/1"))
    assert answer["collection"] == "deep/sharded"
    assert answer["coords"] == [5, 1]
    assert answer["shard"] == "deep/sharded/c/1/0"
    assert answer["codecs"] == ["bytes", "zstd"]
    stored = Path(source, answer["shard"]).read_bytes()[answer["offset"] :][: answer["size"]]
    assert stored == Path(source, "deep/plain/c/5/1").read_bytes()
    for offset in (answer["offset"], answer["offset"] + answer["size"] - 1):
        back = invoke("locate", source, "--shard", answer["shard"], "--offset", str(offset))
        assert back == "path: deep/sharded/c/5/1\n"
    assert "offset: " in invoke("locate", source, "deep/sharded/c/5/1")


def test_info(source: str) -> None:
    (told,) = json.loads(invoke("info", "--json", source))["collections"]
    assert told["path"] == "deep/sharded"
    assert told["shape"] == [100, 90]
    assert (told["chunk_shape"], told["shard_shape"]) == ([10, 10], [40, 40])
    assert (told["grid_chunks"], told["chunks"], told["shards"]) == (90, 74, 8)
    shards = [p for p in Path(source, "deep/sharded/c").rglob("*") if p.is_file()]
    assert told["shard_bytes"] == sum(p.stat().st_size for p in shards)
    plain = [p for p in Path(source, "deep/plain/c").rglob("*") if p.is_file()]
    assert told["stored_bytes"] == sum(p.stat().st_size for p in plain)
    table = invoke("info", source)
    assert "deep/sharded" in table
    assert "74 of 90 (82%)" in table


def test_info_of_what_has_ids(tmp_path: Path) -> None:
    handmade_ids.CASES["meshes_sound"](tmp_path)
    (told,) = json.loads(invoke("info", "--json", str(tmp_path)))["collections"]
    assert told["grid_chunks"] is None
    head, row = invoke("info", str(tmp_path)).splitlines()
    assert row[: head.index("chunks  shards") + len("chunks")].endswith(f" {told['chunks']}")
    assert "None" not in row


def test_version() -> None:
    assert shardfs("--version").stdout.decode() == f"shardfs {__version__}\n"


# ---- mount, as far as the command line goes ----


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """What `mount.mount` was called with."""
    calls: list[tuple[tuple[str, ...], dict[str, Any]]] = []

    def mount(*args: str, **kwargs: Any) -> int:
        calls.append((args, kwargs))
        return 5

    stand_in = types.ModuleType("shardfs.mount")
    stand_in.mount = mount  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shardfs.mount", stand_in)
    return calls


@pytest.mark.parametrize(
    "args",
    [
        ["mount", "/data/x", "/mnt", "-o", "ro,allow_other,default_permissions,uid=7"],
        ["/data/x", "/mnt", "-o", "ro,allow_other,default_permissions,uid=7,dev,suid"],  # as mount.fuse3(8) calls it
        ["-o", "uid=7,allow-other,default-permissions", "/data/x", "/mnt"],
        ["-oallow_other,default_permissions", "/data/x", "-o", "uid=7", "/mnt"],
        ["mount", "--allow-other", "--default-permissions", "--uid", "7", "/data/x", "/mnt", "-o", "uid=3"],
    ],
)
def test_mount_and_its_short_forms(args: list[str], mounted: list[Any]) -> None:
    assert cli.run(args) == 5
    ((where, how),) = mounted
    assert where == ("/data/x", "/mnt")
    settings: FuseSettings = how["fuse"]
    assert (settings.allow_other, settings.uid, how["foreground"]) == (True, 7, False)


def test_a_relative_source_does_not_depend_on_where_the_daemon_runs(
    mounted: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.run(["mount", "-f", "x.zarr", "/mnt"])
    cli.run(["mount", "memory://x.zarr", "/mnt"])
    assert [call[0][0] for call in mounted] == [str(tmp_path / "x.zarr"), "memory://x.zarr"]
    assert [call[1]["foreground"] for call in mounted] == [True, False]


def test_the_kernel_remembers_no_longer_than_the_index_is_trusted(mounted: list[Any]) -> None:
    cli.run(["/x", "/mnt", "-o", "index_ttl=5,negative_timeout=2"])
    settings: FuseSettings = mounted[0][1]["fuse"]
    assert (settings.attr_timeout, settings.entry_timeout, settings.negative_timeout) == (5, 5, 2)


def test_variables_are_set_before_the_source_is_opened(mounted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDFS_TEST_VARIABLE", "before")  # so that it is taken back afterwards
    cli.run(["/x", "/mnt", "-o", "env.SHARDFS_TEST_VARIABLE=a"])
    assert os.environ["SHARDFS_TEST_VARIABLE"] == "a"


# ---- a real mount ----


@pytest.mark.fuse
def test_mount_locate_umount(source: str, tmp_path: Path) -> None:
    """Called as mount.fuse3(8) does it; `locate` asks the mount."""
    assert shardfs(source, str(tmp_path), "-o", "ro,index_ttl=60,dev,suid").returncode == 0
    try:
        chunk = tmp_path / "deep/sharded/c/5/1"
        assert chunk.read_bytes() == Path(source, "deep/plain/c/5/1").read_bytes()
        told = json.loads(shardfs("locate", "--json", str(chunk)).stdout)
        wanted = json.loads(invoke("locate", "--json", source, "deep/sharded/c/5/1"))
        assert told == {key: wanted[key] for key in ("shard", "offset", "size", "codecs")}
        again = shardfs(source, str(tmp_path))
        assert (again.returncode, b"mounted here already" in again.stderr) == (5, True)
        with chunk.open("rb"):
            busy = shardfs("umount", str(tmp_path))
            assert busy.returncode == 4
            assert f"busy: used by {os.getpid()} (".encode() in busy.stderr
    finally:
        ended = shardfs("umount", str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert os.listdir(tmp_path) == []


@pytest.mark.fuse
def test_what_the_daemon_meets_is_told_by_the_program_that_started_it(source: str, tmp_path: Path) -> None:
    for code, told, args in [
        (3, "No such file", [f"{tmp_path}/none", str(tmp_path)]),
        (3, "Protocol not known", ["nope://x", str(tmp_path)]),
        (3, "memory://none: No such file", ["memory://none", str(tmp_path)]),
        (4, "no sharded", [f"{source}/deep/plain", str(tmp_path)]),
        (5, "No such file", [source, f"{tmp_path}/none"]),
        (5, "is not a directory", [source, f"{source}/zarr.json"]),
        (5, "is not a mount of shardfs", ["umount", str(tmp_path)]),
        (6, "not ready within", [source, str(tmp_path), "-o", "ready_timeout=0.001"]),
    ]:
        done = shardfs(*args)
        assert (done.returncode, told in done.stderr.decode()) == (code, True), (args, done.stderr)
        assert done.stderr.count(b"\n") == 1, args
    assert os.listdir(tmp_path) == []


# ---- what goes wrong ----


def test_exit_codes_and_one_line_of_explanation(source: str, tmp_path: Path) -> None:
    for code, told, args in [
        (2, "Missing command", []),
        (2, "Missing argument", ["ls"]),
        (2, "no profile 'lss'", ["lss"]),
        (2, "mount needs SOURCE and MOUNTPOINT, or the name of a profile", ["./lss"]),
        (2, "mount needs SOURCE and MOUNTPOINT, or the name of a profile", ["mount"]),
        (2, "allow_other needs default_permissions", [source, str(tmp_path), "-o", "allow_other"]),
        (2, "allow_root cannot be combined", [source, str(tmp_path), "-o", "allow_root,uid=7"]),
        (
            2,
            "allow_other needs default_permissions",
            [source, str(tmp_path), "-o", "allow_other,default_permissions=no"],
        ),
        (2, "No such option", ["ls", "--nope", source]),
        (2, "did you mean 'attr_timeout'", [source, str(tmp_path), "-o", "atr_timeout=3"]),
        (2, "use -o writable or -o ro", [source, str(tmp_path), "-o", "rw,dev,suid"]),
        (2, "--threads: must be at least 1", ["mount", source, str(tmp_path), "--threads", "0"]),
        (2, "is no chunk on a mount", ["locate", source]),
        (2, "locate needs", ["locate", source, "zarr.json", "--shard", "x"]),
        (3, f"{tmp_path}/none: No such file", ["ls", f"{tmp_path}/none"]),
        (3, "nothing: No such file", ["cat", source, "nothing"]),
        (3, "is a directory", ["cat", source, "deep"]),
        (3, "is not a chunk", ["locate", source, "zarr.json"]),
        (
            3,
            "no chunk covers byte 99999999",
            ["locate", source, "--shard", "deep/sharded/c/0/0", "--offset", "99999999"],
        ),
        (2, "not in the range", ["locate", source, "--shard", "deep/sharded/c/0/0", "--offset", str(2**64)]),
        (2, "the source is empty", ["ls", ""]),
        (2, "the source is empty", ["mount", "", str(tmp_path)]),
        (2, "Missing command", ["config"]),
        (3, "deep/sharded/c/0: is a directory", ["cat", source, "deep/sharded/c/0"]),
        (3, "deep/sharded/c/99/0: no such chunk", ["cat", source, "deep/sharded/c/99/0"]),
        (3, "/dev/null: is neither", ["ls", "/dev/null"]),
        (3, "Protocol not known", ["info", "nope://x"]),
        (4, "no sharded", ["info", str(tmp_path)]),
    ]:
        done = shardfs(*args)
        error = done.stderr.decode()
        assert (done.returncode, done.stdout) == (code, b""), (args, error)
        assert told in error, args
        assert error.startswith("shardfs: "), args
        assert error.count("\n") == 1, args


def test_errors_of_the_store_are_told_without_a_traceback_and_bugs_with_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = type("NoCredentialsError", (Exception,), {"__module__": "botocore.exceptions"})
    for error, code, traceback in [
        (foreign("who are you"), 3, False),
        (ImportError("Install s3fs"), 3, False),
        (CorruptShardError("a", "c/0", "its index is cut off"), 1, False),
        (ZeroDivisionError("a bug"), 1, True),
    ]:

        def fail(*_args: Any, error: Exception = error, **_kwargs: Any) -> None:
            raise error

        monkeypatch.setattr("shardfs.tree.open_tree", fail)
        assert cli.run(["ls", "s3://x"]) == code
        told = capsys.readouterr().err
        assert ("Traceback" in told) == traceback
        assert told.splitlines()[-1].startswith("shardfs: ")
        assert str(error) in told


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    for done in (shardfs("ls", "--debug", str(tmp_path)), shardfs("ls", str(tmp_path), SHARDFS_DEBUG="1")):
        assert done.returncode == 4
        assert b"Traceback" in done.stderr


def test_nobody_reads_on(source: str) -> None:
    """As in `ls | head -1`: no message."""
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "shardfs", "ls", source]
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, env=where) as process:
        os.close(writing)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (1, b"")


@pytest.mark.parametrize("verb", ["ls", "info"])
def test_standard_streams_may_be_closed(verb: str, source: str) -> None:
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    for closed, code, output, error in [
        (">&-", 3, False, b"shardfs: Bad file descriptor\n"),
        ("<&- 2>&-", 0, True, b""),
        ("<&- >&- 2>&-", 3, False, b""),
    ]:
        command = ["sh", "-c", f'exec "$0" -m shardfs "$@" {closed}', sys.executable, verb, source]
        done = subprocess.run(command, capture_output=True, timeout=60, env=where, check=False)
        assert (done.returncode, bool(done.stdout), done.stderr) == (code, output, error), closed


def test_help_comes_at_once() -> None:
    """Nothing of weight is imported: the time is measured by scripts, not here."""
    program = "import sys; from shardfs import cli; cli.run(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = set(done.stderr.split())
    assert "shardfs VERB" in done.stdout
    assert not modules & {"numpy", "fsspec", "rich", "mfusepy", "asyncio", "numcodecs", "msgspec"}


def test_help_imports_nothing_that_takes_long() -> None:
    heavy = ("asyncio", "fsspec", "mfusepy", "numpy", "rich")
    code = f"import sys; from shardfs.cli import run; run(['--help']); print([m for m in {heavy} if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.splitlines()[-1] == "[]"
