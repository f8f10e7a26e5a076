"""The command line: what the verbs print, and the exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner

from shardfs import __version__, cli
from shardfs.cli import ls
from shardfs.config import options
from shardfs.fuse.settings import FuseSettings
from shardfs.model.errors import CorruptShardError
from shardfs.model.listing import Batch
from shardfs.storage.disk_cache import DiskCache
from tests import forking, handmade_ids
from tests.datasets import ROOT
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardfs.config.options import Options

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
    command, environment = [sys.executable, "-m", "shardfs", *args], {**os.environ, **env}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = forking.run(command, 250, out, err, env=environment)
        if code is None:
            return subprocess.run(command, capture_output=True, timeout=250, env=environment, check=False)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def invoke(*args: str) -> str:
    """A verb in this process; it must succeed."""
    invocation = CliRunner().invoke(cli.commands, args, catch_exceptions=False)
    assert invocation.exit_code == 0, invocation.output
    return invocation.output


# ---- what the verbs print ----


def test_ls(source: str) -> None:
    assert invoke("ls", source) == "deep\nzarr.json\n"
    assert invoke("ls", source, "deep/sharded/c").split() == [str(i) for i in range(10)]
    assert invoke("ls", source, "deep/sharded/c/4").split() == ["0", "1", "2", "3", "8"]
    assert invoke("ls", source, "deep/sharded/c/4/0") == "0\n"


def test_ls_long_shows_sizes(source: str) -> None:
    kind, size, _, _, name = invoke("ls", "-l", source, "deep/sharded/c/0/1").split()
    assert (kind, name) == ("-", "1")
    assert int(size) == os.stat(f"{source}/deep/plain/c/0/1").st_size
    assert invoke("ls", "-l", source, "deep/sharded").splitlines()[0].startswith("d            0 ")


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
        completed = shardfs(verb, str(tmp_path))
        assert (completed.returncode, completed.stderr) == (0, b"")
        assert completed.stdout.splitlines()[0 if verb == "info" else -1].startswith(rb"a\nb\x1b[31m\xff")
    (told,) = json.loads(shardfs("info", "--json", str(tmp_path)).stdout)["collections"]
    assert told["path"] == name


def test_a_slash_behind_a_path_asks_for_a_directory(source: str) -> None:
    for verb in ("cat", "ls"):
        completed = shardfs(verb, source, "zarr.json/")
        assert (completed.returncode, completed.stderr) == (3, b"shardfs: zarr.json/: Not a directory\n")
    assert invoke("ls", source, "deep/sharded/c/4/") == invoke("ls", source, "deep/sharded/c/4")


def test_a_path_that_exists_is_no_chained_url(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(f"{source}/deep/sharded", tmp_path / "zip::sharded")
    monkeypatch.chdir(tmp_path)
    assert invoke("ls", "zip::sharded") == "c\nzarr.json\n"
    assert invoke("ls", str(tmp_path / "zip::sharded")) == "c\nzarr.json\n"
    completed = shardfs("info", "reference://x")  # which wants an option
    assert (completed.returncode, completed.stderr.count(b"\n")) == (3, 1)
    assert completed.stderr.startswith(b"shardfs: reference://x: cannot be opened: ReferenceFileSystem")
    completed = shardfs("info", "no::such")
    assert (completed.returncode, completed.stderr) == (3, b"shardfs: no::such: No such file or directory\n")


def test_cat(source: str) -> None:
    names = ["c/0/0", "c/3/7", "c/9/8"]
    completed = shardfs("cat", source, *(f"deep/sharded/{n}" for n in names))
    assert completed.stdout == b"".join(Path(source, "deep/plain", n).read_bytes() for n in names)
    assert (completed.returncode, completed.stderr) == (0, b"")


def test_locate_and_back(source: str) -> None:
    answer = json.loads(invoke("locate", "--json", source, "deep/sharded/c/5/1"))
    assert answer["collection"] == "deep/sharded"
    assert answer["coords"] == [5, 1]
    assert answer["shard"] == "deep/sharded/c/1/0"
    assert answer["codecs"] == ["bytes", "zstd"]
    content = Path(source, answer["shard"]).read_bytes()[answer["offset"] :][: answer["size"]]
    assert content == Path(source, "deep/plain/c/5/1").read_bytes()
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
    assert "74 of 90 chunks (82%)" in table


def test_info_of_what_has_ids(tmp_path: Path) -> None:
    handmade_ids.CASES["meshes_sound"](tmp_path)
    (told,) = json.loads(invoke("info", "--json", str(tmp_path)))["collections"]
    assert told["grid_chunks"] is None
    table = invoke("info", str(tmp_path))
    assert f"  {told['chunks']} chunks, " in table
    assert "None" not in table


def test_version() -> None:
    assert shardfs("--version").stdout.decode() == f"shardfs {__version__}\n"


# ---- mount, as far as the command line goes ----


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Options, bool]]:
    """Source, mountpoint, options and whether it is in the foreground, of each call of `mount.mount`."""
    calls: list[tuple[str, str, Options, bool]] = []

    def mount(source: str, place: str, options: Options, *, foreground: bool, ready: object) -> int:
        calls.append((source, place, options, foreground))
        return 5

    monkeypatch.setattr("shardfs.daemon.mount.mount", mount)
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
    ((source, mountpoint, options, foreground),) = mounted
    assert (source, mountpoint) == ("/data/x", "/mnt")
    settings = FuseSettings.from_options(options)
    assert (settings.allow_other, settings.uid, foreground) == (True, 7, False)


def test_a_relative_source_does_not_depend_on_where_the_daemon_runs(
    mounted: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.run(["mount", "-f", "x.zarr", "/mnt"])
    cli.run(["mount", "memory://x.zarr", "/mnt"])
    assert [source for source, *_ in mounted] == [str(tmp_path / "x.zarr"), "memory://x.zarr"]
    assert [foreground for *_, foreground in mounted] == [True, False]


def test_the_kernel_remembers_no_longer_than_the_index_is_trusted(mounted: list[Any]) -> None:
    cli.run(["/x", "/mnt", "-o", "index_ttl=5,negative_timeout=2"])
    settings = FuseSettings.from_options(mounted[0][2])
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
        (5, f"the mountpoint does not exist: mkdir -p {tmp_path}/none", [source, f"{tmp_path}/none"]),
        (5, "the mountpoint is not a directory", [source, f"{source}/zarr.json"]),
        (5, "is not a mount of shardfs", ["umount", str(tmp_path)]),
        (6, "not ready within", [source, str(tmp_path), "-o", "ready_timeout=0.001"]),
    ]:
        completed = shardfs(*args)
        assert (completed.returncode, told in completed.stderr.decode()) == (code, True), (args, completed.stderr)
        assert completed.stderr.count(b"\n") == 1, args
    assert os.listdir(tmp_path) == []


@pytest.mark.fuse
def test_a_mount_in_the_foreground_says_that_it_is_ready(source: str, tmp_path: Path) -> None:
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "shardfs", "mount", "-f", source, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=where) as process:
        wait_until((tmp_path / "deep/sharded/zarr.json").exists, 60)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=250)
    assert (process.returncode, output.decode()) == (0, f"{source} is mounted on {tmp_path}; Ctrl-C unmounts it\n")


@pytest.mark.fuse
@pytest.mark.parametrize(("words", "lines"), [((), 0), (("-v",), 1)])
def test_a_mount_tells_a_script_nothing_unless_it_asks(
    words: tuple[str, ...], lines: int, source: str, tmp_path: Path
) -> None:
    completed = shardfs("mount", *words, source, str(tmp_path))
    shardfs("umount", str(tmp_path))
    assert (completed.returncode, completed.stdout.count(b" is mounted on "), completed.stderr) == (0, lines, b"")


# ---- verbs and help ----


def test_no_words_mean_help() -> None:
    for words in ((), ("config",)):
        completed = shardfs(*words)
        assert (completed.returncode, completed.stderr) == (0, b"")
        assert completed.stdout == shardfs(*words, "--help").stdout


@pytest.mark.parametrize(
    ("words", "help_words"),
    [((), ("--help",)), (("info",), ("info", "--help")), (("config", "show"), ("config", "show", "--help"))],
)
def test_help_is_a_verb(words: tuple[str, ...], help_words: tuple[str, ...]) -> None:
    assert shardfs("help", *words).stdout == shardfs(*help_words).stdout
    assert b"Usage: shardfs " in shardfs("help", *words).stdout


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["infoo", "SOURCE"], "info"),
        (["infoo", "--json", "SOURCE"], "info"),
        (["mout", "SOURCE", "MOUNTPOINT"], "mount"),
        (["umoutn", "MOUNTPOINT"], "umount"),
        (["help", "infoo"], "info"),
        (["verfiy", "--deep", "SOURCE"], "verify"),
    ],
)
def test_a_mistyped_verb_is_no_source(words: list[str], meant: str, source: str, tmp_path: Path) -> None:
    places = {"SOURCE": source, "MOUNTPOINT": str(tmp_path)}
    completed = shardfs(*(places.get(word, word) for word in words))
    assert (completed.returncode, completed.stderr.count(b"\n")) == (2, 1)
    assert f"; did you mean '{meant}'?" in completed.stderr.decode()


def test_a_path_or_profile_may_resemble_a_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounted: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "infoo").mkdir()
    assert cli.run(["infoo", "/mnt"]) == 5
    (tmp_path / "x.toml").write_text('[mount.mout]\nsource = "/x"\nmountpoint = "/y"\n')
    monkeypatch.setenv("SHARDFS_CONFIG", str(tmp_path / "x.toml"))
    assert cli.run(["mout"]) == 5
    assert [call[:2] for call in mounted] == [
        (str(tmp_path / "infoo"), "/mnt"),
        ("/x", "/y"),
    ]


def test_unmount_is_another_name(tmp_path: Path) -> None:
    completed = shardfs("unmount", str(tmp_path))
    assert (completed.returncode, b"is not a mount of shardfs" in completed.stderr) == (5, True)


def test_the_list_of_verbs_cuts_no_sentence() -> None:
    assert "..." not in shardfs("--help").stdout.decode().partition("Commands:")[2]


def test_the_help_of_mount_has_a_group_for_each_kind_of_option() -> None:
    text = shardfs("mount", "--help", COLUMNS="80").stdout.decode()
    assert max(map(len, text.splitlines())) <= 80
    places = [text.index(f"\n{scope}:\n") for scope in options.SCOPES]
    assert places == sorted(places)
    for setting in options.settings():
        at = text.index(f"\n  {setting.flag}")
        assert options.SCOPES[sum(place < at for place in places) - 1] == setting.scope


# ---- arrays and names in order ----


@pytest.fixture(scope="module")
def levels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A group of arrays, sharded and not, and one whose data type shardfs does not know."""
    path = tmp_path_factory.mktemp("levels") / "x.zarr"
    group = zarr.open_group(str(path), mode="w")
    for i in range(11):
        shards = None if i == 3 else (64, 64, 64)
        group.create_array(f"s{i}", shape=(30720, 21504, 21504), chunks=(32, 32, 32), shards=shards, dtype="float64")
    document = json.loads((path / "s3/zarr.json").read_text())
    (path / "odd").mkdir()
    (path / "odd/zarr.json").write_text(json.dumps({**document, "data_type": "int4"}))
    return path


def test_info_lists_all_arrays_in_order_at_80_columns(levels: Path) -> None:
    text = shardfs("info", str(levels), COLUMNS="80").stdout.decode()
    assert [line for line in text.splitlines() if line[0] != " "] == ["odd", *(f"s{i}" for i in range(11))]
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("  float64 30720 x 21504 x 21504, chunks 32 x 32 x 32") == 11
    assert text.count("not sharded") == 2
    told = json.loads(invoke("info", "--json", str(levels)))
    assert [array["path"] for array in told["collections"]] == [f"s{i}" for i in range(11) if i != 3]
    assert [(array["path"], array["data_type"]) for array in told["unsharded"]][1:] == [("s3", "float64")]
    assert "int4" in told["unsharded"][0]["data_type"]


def test_ls_sorts_numbers_by_value(levels: Path) -> None:
    names = ["odd", *(f"s{i}" for i in range(11)), "zarr.json"]
    assert invoke("ls", str(levels)).split() == names
    assert [row.split()[-1] for row in invoke("ls", "-l", str(levels)).splitlines()] == names
    assert [json.loads(row)["name"] for row in invoke("ls", "--json", str(levels)).splitlines()] == names


def test_ls_sorts_a_bounded_part_of_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(*names: bytes) -> Batch:
        numbers, n = np.arange(len(names), dtype=np.uint64), np.zeros(len(names), np.int64)
        return Batch(np.array(names), numbers, np.zeros(len(names), np.bool_), n, n, numbers)

    read = 0

    def batches() -> Iterator[Batch]:
        nonlocal read
        for names in ((b"x10", b"x9"), (b"x2",), (b"x1", b"x0")):
            read += 1
            yield batch(*names)

    monkeypatch.setattr(ls, "SORTED", 3)
    ordered = ls._ordered(batches())
    assert next(ordered).names.tolist() == [b"x2", b"x9", b"x10"]
    assert read == 2  # the rest streams
    assert [b.names.tolist() for b in ordered] == [[b"x1", b"x0"]]
    assert [b.names.tolist() for b in ls._ordered(iter([batch(b"10", b"9")]))] == [[b"9", b"10"]]


# ---- what goes wrong ----


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("s3://bucket/x", "s3fs", "s3"),
        ("simplecache::s3://bucket/x", "s3fs", "s3"),
        ("gs://bucket/x", "gcsfs", "gcs"),
        ("abfs://container/x", "adlfs", "azure"),
        ("http://localhost/x", "aiohttp", "http"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(url: str, package: str, extra: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from shardfs import cli; sys.exit(cli.run(['info', {url!r}]))"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert completed.returncode == 3
    assert completed.stderr.startswith(f"shardfs: {url}: needs the package {package} (")
    assert completed.stderr.endswith(f"): pip install '.[{extra}]' in a checkout of the code\n")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(requirement.startswith(package) for requirement in extras[extra])


def test_a_source_without_shards_says_what_is_in_it(source: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("x")
    zarr.create_array(str(tmp_path / "old/a"), shape=(4,), chunks=(2,), dtype="u1", zarr_format=2)
    zarr.create_array(str(tmp_path / "new/b"), shape=(4,), chunks=(2,), dtype="u1")
    for name, told in (
        ("empty", "no sharded dataset found, it is empty: to write a new one, mount it with --rw --create zarr3\n"),
        ("other", "no sharded dataset found (looked for Zarr v3, precomputed, N5, bcolz, Blosc2).\n"),
        ("old", "Found: an unsharded Zarr v2 array at a; a mount with -o layout=zarr3|n5"),
        ("new", "Found: an unsharded Zarr v3 array at b; a mount with -o layout=zarr2|n5"),
    ):
        completed = shardfs("info", str(tmp_path / name))
        assert completed.returncode == 4
        assert completed.stderr.decode().startswith(f"shardfs: {tmp_path / name}: ")
        assert told in completed.stderr.decode()
    told = shardfs("info", f"{source}/deep/plain").stderr.decode()
    layouts = re.findall(r"-o layout=(\S+) can show it", told)[0].split("|")
    assert "zarr2" in layouts
    for layout in layouts:
        assert shardfs("ls", "-o", f"layout={layout}", f"{source}/deep/plain").returncode == 0


def test_a_refusal_of_a_layout_names_the_way_around(levels: Path) -> None:
    refused = shardfs("info", "-o", "layout=n5", str(levels))
    assert (refused.returncode, refused.stderr.count(b"\n")) == (4, 1)
    assert refused.stderr.startswith(f"shardfs: {levels}: odd: cannot be shown as n5: ".encode())
    assert b"; -o unsupported=skip omits it" in refused.stderr
    assert shardfs("info", "-o", "layout=n5,unsupported=skip", str(levels)).returncode == 0


def test_exit_codes_and_one_line_of_explanation(source: str, tmp_path: Path) -> None:
    for code, told, args in [
        (2, "Missing argument", ["ls"]),
        (2, "no verb 'lss'; did you mean 'ls'?", ["lss"]),
        (2, "no profile 'zzz'", ["zzz"]),
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
        (2, "is not a chunk on a mount", ["locate", source]),
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
        (3, "deep/sharded/c/0: is a directory", ["cat", source, "deep/sharded/c/0"]),
        (3, "deep/sharded/c/99/0: no such chunk", ["cat", source, "deep/sharded/c/99/0"]),
        (3, "/dev/null: is neither", ["ls", "/dev/null"]),
        (3, "Protocol not known", ["info", "nope://x"]),
        (4, "no sharded", ["info", str(tmp_path)]),
    ]:
        completed = shardfs(*args)
        error = completed.stderr.decode()
        assert (completed.returncode, completed.stdout) == (code, b""), (args, error)
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

        monkeypatch.setattr("shardfs.vfs.tree.open_tree", fail)
        assert cli.run(["ls", "s3://x"]) == code
        told = capsys.readouterr().err
        assert ("Traceback" in told) == traceback
        assert told.splitlines()[-1].startswith("shardfs: ")
        assert str(error) in told


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    for completed in (shardfs("ls", "--debug", str(tmp_path)), shardfs("ls", str(tmp_path), SHARDFS_DEBUG="1")):
        assert completed.returncode == 4
        assert b"Traceback" in completed.stderr


def test_nobody_reads_on(source: str) -> None:
    """As in `ls | head -1`: no message."""
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "shardfs", "ls", source]
    reading, writing = os.pipe()
    os.close(reading)
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.PIPE, env=where) as process:
        os.close(writing)
        _, error = process.communicate(timeout=250)
    assert (process.returncode, error) == (1, b"")


@pytest.mark.parametrize("verb", ["ls", "info"])
def test_standard_streams_may_be_closed(verb: str, source: str) -> None:
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for closed, code, output, error in [
        (">&-", 3, False, b"shardfs: Bad file descriptor\n"),
        ("<&- 2>&-", 0, True, b""),
        ("<&- >&- 2>&-", 3, False, b""),
    ]:
        command = ["sh", "-c", f'exec "$0" -m shardfs "$@" {closed}', sys.executable, verb, source]
        completed = subprocess.run(command, capture_output=True, timeout=250, env=where, check=False)
        assert (completed.returncode, bool(completed.stdout), completed.stderr) == (code, output, error), closed


def test_help_comes_at_once() -> None:
    """Nothing of weight is imported: the time is measured by scripts, not here."""
    program = "import sys; from shardfs import cli; cli.run(['--help']); print(*sys.modules, file=sys.stderr)"
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    modules = set(completed.stderr.split())
    assert "shardfs VERB" in completed.stdout
    assert not modules & {"numpy", "fsspec", "rich", "mfusepy", "asyncio", "numcodecs", "msgspec"}


def test_help_imports_nothing_that_takes_long() -> None:
    heavy = ("asyncio", "fsspec", "mfusepy", "numpy", "rich")
    code = f"import sys; from shardfs.cli import run; run(['--help']); print([m for m in {heavy} if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=True).stdout
    assert told.splitlines()[-1] == "[]"


def test_cache_info_and_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert invoke("cache", "info") == "empty: there is no cache\n"
    assert invoke("cache", "clear") == "0 B removed\n"
    assert not list(tmp_path.iterdir())
    cache = DiskCache(str(tmp_path / "shardfs"), 1 << 20)
    cache.put(bytes(16), bytes(16), b"x")
    cache.flush(60)
    nbytes = cache.usage().nbytes
    assert f"{tmp_path}/shardfs: 1 entry, " in invoke("cache", "info")
    summary = json.loads(invoke("cache", "info", "--json", "--cache-dir", str(tmp_path / "shardfs")))
    assert (summary["entries"], summary["bytes"]) == (1, nbytes)
    monkeypatch.setenv("SHARDFS_CACHE_DIR", str(tmp_path / "other"))
    assert invoke("cache", "info") == "empty: there is no cache\n"
    assert json.loads(invoke("cache", "clear", "--cache-dir", "auto", "--json")) == {"bytes_removed": nbytes}
    assert cache.usage().entries == 0


def test_a_password_on_the_command_line_is_warned_of(tmp_path: Path) -> None:
    """All users can read it in the list of processes for as long as the mount lives."""
    completed = shardfs("mount", "https://me:s-e-c-r-e-t@localhost:1/x", str(tmp_path), "-o", "store_retries=0")
    assert b"every user can read the password in the URL" in completed.stderr
    assert b"s-e-c-r-e-t" not in completed.stderr
    assert b"password" not in shardfs("mount", "https://localhost:1/x", str(tmp_path), "-o", "store_retries=0").stderr


def test_errors_of_usage_do_not_repeat_a_password() -> None:
    completed = shardfs("mount", "https://me:s-e-c-r-e-t@localhost:1/x")
    assert completed.returncode == 2
    assert b"https://***@localhost:1/x" in completed.stderr
