"""`shardfs doctor`: each finding provoked once."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from shardfs import cli
from shardfs.config.options import LAYOUTS, Options
from shardfs.daemon import asking, doctor
from shardfs.daemon.asking import Mount, MountState
from shardfs.daemon.health import NOTE, OK, WRONG, Diagnosis
from shardfs.daemon.opening import check, open_mounted
from shardfs.daemon.status_server import StatusServer
from shardfs.model.errors import ShardfsError, message
from shardfs.storage.source_locks import journal_directory
from shardfs.write.journal import Journal, RecordKind
from tests.handmade import zarr_metadata
from tests.mount.programs import copy_tree, shardfs
from tests.storage.test_store import WithoutRanges, http_server
from tests.write.mounts import writable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.datasets import Dataset


@pytest.fixture
def source(dataset: Callable[[str, str], Dataset]) -> Path:
    return dataset("zarr3", "default").path


@pytest.fixture
def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


# ---- the machine


def test_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DEVICE", str(tmp_path / "fuse"))
    assert "modprobe fuse" in doctor._device().fix
    (tmp_path / "fuse").write_text("")
    assert doctor._device().state == OK

    def refuse(path: str, flags: int) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")  # what the cgroup of a container says

    monkeypatch.setattr(os, "open", refuse)
    finding = doctor._device()
    assert (finding.state, "--device /dev/fuse" in finding.fix) == (WRONG, True)


def test_fusermount3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_user: None) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert (doctor._fusermount().state, doctor._fusermount().fix) == (WRONG, "apt install fuse3")
    program = tmp_path / "fusermount3"
    program.write_text("")
    monkeypatch.setattr(shutil, "which", lambda name: str(program))
    assert "chmod u+s" in doctor._fusermount().fix
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert doctor._fusermount().state == OK


def test_libfuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert (doctor._libfuse().state, doctor._libfuse().fix) == (WRONG, "apt install fuse3")


def test_packages() -> None:
    versions = doctor._packages()
    assert versions.state == OK
    assert f"fsspec {fsspec.__version__}" in versions.message
    assert "mfusepy " in versions.message


def test_user_allow_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_user: None) -> None:
    conf = tmp_path / "fuse.conf"
    monkeypatch.setattr(doctor, "FUSE_CONF", str(conf))
    assert doctor._fuse_conf(Options()).state == NOTE
    conf.write_text("# user_allow_other\n")
    finding = doctor._fuse_conf(Options(allow_other=True))
    assert (finding.state, finding.fix) == (WRONG, f"as root: echo user_allow_other >> {conf}")
    conf.write_text("mount_max = 10\nuser_allow_other\n")
    assert doctor._fuse_conf(Options(allow_other=True)).state == OK


def test_the_time_out_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FUSE_SYSCTL", str(tmp_path))
    assert doctor._kernel_timeout(Options()).state == OK
    (tmp_path / "default_request_timeout").write_text("0\n")
    (tmp_path / "max_request_timeout").write_text("300\n")
    assert doctor._kernel_timeout(Options()).state == OK
    (tmp_path / "default_request_timeout").write_text("40\n")
    finding = doctor._kernel_timeout(Options())
    assert finding.state == WRONG
    assert finding.fix.startswith("store_timeout=10, or sysctl fs.fuse.max_request_timeout=120 ")
    assert doctor._kernel_timeout(Options(store_timeout=10)).state == OK


def test_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (256, 1024))
    finding = doctor._descriptors()
    assert (finding.state, "LimitNOFILE=2048" in finding.fix) == (WRONG, True)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (256, 1 << 20))
    assert doctor._descriptors().state == OK


def test_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MEMINFO", str(tmp_path / "meminfo"))
    monkeypatch.setattr(doctor, "CGROUP", str(tmp_path))
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4194304 kB\n")
    assert doctor._memory(Options()).state == OK
    (tmp_path / "memory.max").write_text("268435456\n")
    finding = doctor._memory(Options())
    assert (finding.state, finding.fix) == (WRONG, "index_cache=64M,chunk_cache=64M")


STORE = {"silent": False, "errors": {"ENOENT": 3}}


@pytest.mark.parametrize(
    ("state", "told", "expected", "words"),
    [
        ("dead", None, WRONG, "has died"),
        ("hangs", None, WRONG, "does not answer"),
        ("closed", None, NOTE, "another user"),
        ("old", None, NOTE, "reports no status"),
        ("answers", {"store": {**STORE, "silent": True}, "writing": None}, WRONG, "its store does not answer"),
        ("answers", {"store": {**STORE, "errors": {"EIO": 2}}, "writing": None}, NOTE, "failed 2 times"),
        ("answers", {"store": STORE, "writing": None}, OK, "answers"),
        ("answers", {"store": None, "writing": None}, OK, "answers"),
    ],
)
def test_mounts(state: str, told: Any, expected: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "mounts", lambda: [Mount("/mnt/x", "/data", MountState(state), told)])
    (finding,) = doctor._mounts()
    assert (finding.state, words in finding.message) == (expected, True)
    assert ("umount --lazy /mnt/x" in finding.fix) == (state in ("dead", "hangs"))


# ---- sources


def examined(source: str, **options: Any) -> dict[str, Diagnosis]:
    return {f.check: f for f in doctor.examine_source(source, Options(**{"store_timeout": 2.0, **options}))}


def test_a_local_source(source: Path, tmp_path: Path) -> None:
    findings = examined(str(source))
    assert {check: f.state for check, f in findings.items()} == {"store": OK, "dataset": OK}
    assert "whether its disk is mounted" in examined(str(tmp_path / "missing"))["store"].fix
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/file").write_text("x")
    assert examined(str(tmp_path / "plain"))["dataset"].state == WRONG


def test_a_web_server_with_and_without_ranges(source: Path) -> None:
    pytest.importorskip("aiohttp")
    with http_server(source) as (url, _):
        assert {check: f.state for check, f in examined(url).items()} == {
            "store": OK, "byte ranges": OK, "dataset": OK,
        }  # fmt: skip
    with http_server(source, WithoutRanges) as (url, _):
        finding = examined(url)["byte ranges"]
        assert (finding.state, "does not send byte ranges" in finding.message, "nginx" in finding.fix) == (
            WRONG,
            True,
            True,
        )


def test_nobody_listens() -> None:
    pytest.importorskip("aiohttp")
    finding = examined("http://127.0.0.1:9/x", store_retries=0)["store"]
    assert (finding.state, "check the " in finding.fix) == (WRONG, True)


def test_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setattr(doctor, "SECONDS", 100.0)  # botocore works for half a second, or more, before it misses them
    options = {"storage_options": {"endpoint_url": "http://127.0.0.1:9"}, "store_timeout": 100.0, "store_retries": 0}
    findings = examined("s3://bucket/x", **options)
    assert "AWS_PROFILE" in findings["credentials"].fix


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> None:
        raise ImportError("Install gcsfs to access Google Storage")

    monkeypatch.setattr(doctor, "open_store", missing)
    assert examined("gs://bucket/x")["store"].fix == "pip install '.[gcs]' in a checkout of the code"


def test_a_store_that_says_nothing() -> None:
    pytest.importorskip("aiohttp")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        finding = examined(f"http://127.0.0.1:{silent.getsockname()[1]}", store_timeout=0.3)["store"]
    assert (finding.state, "does not answer within 0.3 s" in finding.message) == (WRONG, True)


class Wrong:
    """A store that sends other bytes than were asked for."""

    def require_ranges(self, keys: object) -> None:
        pass

    def open(self, name: str) -> Wrong:
        return self

    def read(self, requests: object) -> list[bytes]:
        return [b"xxxx"]


def test_a_proxy_that_answers_wrongly() -> None:
    store: Any = Wrong()
    (finding,) = doctor._ranges(store, {"zarr.json": b"0123456789"})
    assert (finding.state, "proxy" in finding.fix) == (WRONG, True)
    for documents in ({}, {"zarr.json": bytes(doctor.MOST_BYTES + 1)}):  # the second is the beginning of a longer one
        (finding,) = doctor._ranges(store, documents)
        assert finding.state == NOTE


# ---- the same answer as that of a mount


@pytest.mark.fuse
@pytest.mark.parametrize(
    ("kind", "words", "code"),
    [
        ("sharded", "writable", 0),
        ("sharded", "layout=n5,chunk_codec=zlib", 2),
        ("sharded", "allow_other", 2),
        ("sharded", "allow_root,uid=7", 2),
        ("sharded", "create=zarr3", 2),
        ("sharded", "writable,create=nonsense", 2),
        ("empty", "writable,create=zarr3", 0),
        ("empty", "writable", 4),
        ("other", "", 4),
        ("missing", "writable,create=zarr3", 3),
        ("sharded", "log_file=/nonexistent/log", 3),
        ("sharded", "access_log=/nonexistent/log", 3),
        ("sharded", "metrics_addr=nowhere.invalid:1", 5),
        ("sharded", "writable,journal=/proc/journals", 3),
        ("web", "", 0),
        ("web", "writable", 4),
    ],
)
def test_doctor_and_mount_agree(kind: str, words: str, code: int, source: Path, tmp_path: Path) -> None:
    for name in ("mnt", "empty", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other/notes.txt").write_text("x")
    options = ["-o", words] if words else []
    with http_server(source) as (url, _):
        place = {"sharded": str(source), "web": url}.get(kind, str(tmp_path / kind))
        told = [json.loads(line) for line in shardfs("doctor", "--json", *options, place).stdout.splitlines()]
        completed = shardfs("mount", *options, place, tmp_path / "mnt")
        assert completed.returncode or shardfs("umount", tmp_path / "mnt").returncode == 0
    checks = {"options", "store", "credentials", "dataset"}
    wrong = [  # `doctor` also reports on the mounts of other tests, with the check "writing"
        finding
        for finding in told
        if finding["state"] == WRONG and (finding["check"] in checks or finding["message"].startswith(f"{place}: "))
    ]
    assert (completed.returncode, bool(wrong)) == (code, code != 0), (completed.stderr, wrong)
    assert "shardfs info" not in "".join(finding["fix"] for finding in wrong), "`info` would repeat the error"


def options_of_mounts() -> st.SearchStrategy[dict[str, Any]]:
    """Values of options that can prevent a mount, alone or together. `{}` in a path is a temporary directory."""
    files = st.sampled_from([None, None, "{}/log", "{}/missing/log", "{}", "{}/public/log"])
    choices: dict[str, st.SearchStrategy[Any]] = {
        "rw": st.sampled_from([True, True, False]),
        "layout": st.sampled_from([*LAYOUTS, "native", "native", "native"]),
        "chunk_codec": st.sampled_from([None, None, "raw", "gzip"]),
        "unsupported": st.sampled_from(["fail", "skip"]),
        "create": st.sampled_from([None, None, "zarr3", "nonsense", "zarr3:chunks_per_shard=0"]),
        "journal": st.sampled_from(
            ["{}/new/journals", "{}/journals", "{}/journals", "{}/public", "{}/link", "{}/file", "{}/source/inside"]
        ),
        "journal_limit": st.sampled_from([None, 0, 1, 1 << 20]),
        "linked_shards": st.sampled_from(["refuse", "replace"]),
        "inplace": st.sampled_from(["never", "uint64"]),
        "log_file": files,
        "access_log": files,
        "metrics_addr": st.sampled_from([None, None, "localhost:0", "nowhere.invalid:1", "localhost:TAKEN"]),
        "allow_other": st.sampled_from([False, False, True]),
        "default_permissions": st.booleans(),
        "allow_root": st.sampled_from([False, False, True]),
        "bare_rw": st.sampled_from([False, False, True]),
        "offline": st.sampled_from([False, False, True]),
        "cache_dir": st.sampled_from([None, None, "{}/cache", "{}/file/cache"]),
    }
    return st.fixed_dictionaries({}, optional=choices)


def mount_opens(source: str, options: Options) -> str:
    """Open all that a mount opens, in its order, and close it; the error, or an empty text."""
    opened: list[Any] = []
    try:
        check(options)
        for path in filter(None, (options.log_file, options.access_log)):
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT))
        if options.metrics_addr is not None:
            opened.append(StatusServer(options.metrics_addr))
        _, writing = open_mounted(source, "/mnt", options, lambda: None)
        if writing is not None:
            assert writing.close(60) == []
    except (OSError, ShardfsError) as e:
        return message(e)
    finally:
        for one in opened:
            one.close()
    return ""


@given(kind=st.sampled_from(["source", "source", "empty", "other", "missing", "file"]), options=options_of_mounts())
@settings(max_examples=150, deadline=None)
def test_doctor_and_mount_agree_on_all_options(kind: str, options: dict[str, Any]) -> None:
    """By the function that opens the source of a mount; the test above asks real mounts."""
    with tempfile.TemporaryDirectory() as place, socket.create_server(("localhost", 0)) as listener:
        for name, mode in (
            ("source", 0o755),
            ("empty", 0o755),
            ("other", 0o755),
            ("journals", 0o700),
            ("public", 0o777),
        ):
            Path(place, name).mkdir()
            Path(place, name).chmod(mode)
        Path(place, "source/zarr.json").write_text(json.dumps(zarr_metadata((4, 4), (4, 4), (2, 2))))
        Path(place, "other/notes.txt").write_text("x")
        Path(place, "file").write_text("x")
        Path(place, "link").symlink_to(f"{place}/journals")
        texts = {"{}": place, "TAKEN": str(listener.getsockname()[1])}
        for name, value in options.items():
            for mark, text in texts.items() if isinstance(value, str) else ():
                value = value.replace(mark, text)
            options[name] = value
        source, chosen = f"{place}/{kind}", Options(**{"journal": f"{place}/journals", **options})
        before = sorted(map(str, Path(place).rglob("*")))
        wrong = [finding for finding in doctor.examine_source(source, chosen) if finding.state == WRONG]
        assert sorted(map(str, Path(place).rglob("*"))) == before, "doctor changes nothing"
        error = mount_opens(source, chosen)
        assert bool(wrong) == bool(error), (error, wrong)


@pytest.mark.fuse
def test_a_source_that_another_mount_writes(source: Path, tmp_path: Path) -> None:
    with writable(copy_tree(source, tmp_path / "source"), tmp_path / "m") as mount:
        mount.mount()
        finding = examined(str(mount.source), rw=True, journal=str(mount.journal))["writing"]
    assert (finding.state, f"already mounted rw by pid {mount.pid}" in finding.message) == (WRONG, True)


def test_a_journal_with_files_of_another_layout(source: Path, tmp_path: Path) -> None:
    place = copy_tree(source, tmp_path / "source")
    native, n5 = (Options(rw=True, journal=str(tmp_path / "journals"), layout=name) for name in ("native", "n5"))
    journal = Journal.open(journal_directory(str(place), native.journal), str(place), limit_bytes=1 << 20)
    journal.append(RecordKind.PUT, {"path": "c/0/0"}, b"x")
    journal.close(clean=False)
    for options, state in ((native, OK), (n5, WRONG)):
        verdict = {finding.check: finding for finding in doctor.examine_source(str(place), options)}["writing"]
        assert verdict.state == state, verdict
        assert ("written with the native layout" in verdict.message) == (state == WRONG)


# ---- the verb


def run(*words: str) -> tuple[int, str]:
    invocation = CliRunner().invoke(cli.commands, ["doctor", *words], standalone_mode=False)
    assert invocation.exception is None, invocation.exception
    return invocation.return_value, invocation.output


def test_the_verb(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_root: None) -> None:
    for module in (asking, doctor):
        monkeypatch.setattr(module, "mounts", lambda *_: [])
    monkeypatch.setattr(doctor, "DEVICE", "/dev/null")
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (1 << 20, 1 << 20))
    monkeypatch.setattr(doctor, "MEMINFO", "/nonexistent")
    code, text = run(str(source))
    assert code == 0, text
    assert f"ok     dataset: {source}: can be mounted" in text
    monkeypatch.setattr(doctor, "DEVICE", str(tmp_path / "none"))
    code, text = run("--json")
    lines = [json.loads(line) for line in text.splitlines()]
    assert (code, lines[0]["check"], lines[0]["state"]) == (1, "device", "wrong")
    assert lines[0]["fix"].startswith("modprobe fuse")
    assert "\n       -> modprobe fuse" in run()[1]


def test_the_verb_for_a_mountpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Mount("/mnt/x", "/data", MountState.DEAD, None)
    for module in (asking, doctor):
        monkeypatch.setattr(module, "mounts", lambda point=None: [dead] if point in (None, "/mnt/x") else [])
    code, text = run("/mnt/x")
    assert (code, text.count("its daemon has died")) == (1, 1)
