"""A mount that can be written to, of a tree in memory: what programs do on it is what they do on a plain directory."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.conftest import _run, mount_entries
from tests.datasets import ROOT
from tests.write.clients import CLIENTS
from tests.write.scale import times

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

pytestmark = pytest.mark.fuse

UNSUPPORTED = {
    "chmod/moves ctime",  # there is one time
    "chmod/set-user-id and set-group-id",
    "chown/to another user, by root",
    "link/shares bytes and number, and is counted",  # a link is a copy
    "mkdir/counts as a link of the directory around",
    "mkfifo/makes a pipe",
    "mknod/a device, by root",
    "open/O_NONBLOCK of a pipe that nobody reads: ENXIO",
    "open/O_TMPFILE makes a file without a name",
    "rename/EXCHANGE",
    "utimensat/atime of its own",
}
"""Cases of `tests.write.posix` that no mount passes. The list may only shrink."""


def program(name: str, *arguments: str | Path, timeout: float = 240) -> str:
    run = _run([sys.executable, "-m", f"tests.write.{name}", *map(str, arguments)], timeout, cwd=ROOT)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def random_operations(path: Path, seed: int, number: int, *more: str) -> None:
    """On one file; `SHARDFS_TORTURE=N` does N times as many."""
    much = ["--seed", str(seed), "--operations", str(number * times())]
    program("fsx", path, *much, *more, timeout=240 * times())


def shell(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    run = _run(["bash", "-euc", script], 60, cwd=directory)
    assert run.returncode == 0, run.stdout + run.stderr
    return run


def content(directory: Path, *, times: bool = True) -> dict[str, Any]:
    """Names, bytes, modes and times, asked for by another process."""
    ask = """if 1:
        import hashlib, json, os, sys
        told = {}
        for at, directories, files in os.walk(sys.argv[1]):
            for name in directories + files:
                path = os.path.join(at, name)
                found = os.lstat(path)
                data = hashlib.sha256(open(path, "rb").read()).hexdigest() if name in files else None
                told[os.path.relpath(path, sys.argv[1])] = data, oct(found.st_mode), found.st_mtime_ns
        print(json.dumps(told))
    """
    run = _run([sys.executable, "-c", ask, directory], 60)
    assert run.returncode == 0, run.stderr
    told: dict[str, Any] = json.loads(run.stdout)
    return told if times else {name: values[:2] for name, values in told.items()}


# ---- what POSIX says


def posix(directory: Path, prefixes: Sequence[str] = ()) -> dict[str, str]:
    told = json.loads(program("posix", directory, *prefixes))
    assert told["ran"] > 120
    failed: dict[str, str] = told["failed"]
    return failed


def test_posix_cases_hold_on_a_plain_directory(plain: Path) -> None:
    unprivileged = {"chown/to another user, by root", "mknod/a device, by root"} if os.geteuid() else set()
    assert {name: why for name, why in posix(plain).items() if name not in unprivileged} == {}


def test_posix_cases(memory_mount: Path) -> None:
    failed = posix(memory_mount)
    assert {name: why for name, why in failed.items() if name not in UNSUPPORTED} == {}
    assert set(failed) == UNSUPPORTED


def test_open_flags(memory_mount: Path, plain: Path) -> None:
    found, wanted = (json.loads(program("opening", directory)) for directory in (memory_mount, plain))
    assert len(wanted) == 144
    assert found == wanted


def test_locks_of_processes(memory_mount: Path) -> None:
    assert json.loads(program("locking", memory_mount)) == []


@pytest.mark.timeout(300 * times())
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_operations(memory_mount: Path, seed: int) -> None:
    random_operations(memory_mount / "file", seed, 5000)


@pytest.mark.timeout(300 * times())
def test_random_operations_hold_on_a_plain_directory(plain: Path) -> None:
    random_operations(plain / "file", 4, 5000)


# ---- programs


@pytest.mark.interop
@pytest.mark.parametrize("client", CLIENTS)
def test_libraries_that_write(memory_mount: Path, client: str) -> None:
    pytest.importorskip({"zarr": "zarr", "z5": "z5py"}.get(client, "tensorstore"))
    program("clients", client, memory_mount)


SOURCE = """
umask 022
mkdir -p source/deep/er source/empty
for i in $(seq 40); do head -c $((i * 4099)) /dev/zero | tr '\\0' "\\\\$((i % 8))" > source/deep/$i; done
seq 20000 > source/text
echo one > source/deep/er/one
chmod 640 source/text; chmod 500 source/deep/er
touch -d 2001-02-03T04:05:06.789 source/text source/deep/er
"""

SCRIPTS = {
    "cp -a": "cp -a source copy; cp -a source/text copy/text2; cp --reflink=auto source/deep/7 copy/seven",
    "cp over": "cp -a source copy; cp source/deep/1 copy/deep/40; cp --remove-destination source/text copy/deep/2",
    "mv": "cp -a source copy; mv copy/deep copy/moved; mv copy/moved/1 copy/2; mv -f copy/2 copy/moved/3; mv copy new",
    "mv -n": "cp -a source copy; mv -n copy/deep/1 copy/deep/2; mv -u copy/deep/3 copy/deep/4 || true",
    "install": "install -D -m 751 source/text a/b/text; install -d -m 700 c",
    "tar": "tar -cf all.tar source; mkdir out; tar -xpf all.tar -C out; tar -rf all.tar -C out source/text; rm all.tar",
    "dd": "dd if=source/text of=a bs=777 conv=fsync; dd if=source/text of=a bs=100 seek=30 count=7 conv=notrunc;"
    "dd if=source/deep/9 of=a oflag=append conv=notrunc bs=5000; dd if=source/text of=b bs=4096 oflag=direct count=3",
    "append": "for i in $(seq 50); do echo $i >> log; done; seq 5 >> source/text; exec 3>>log; echo x >&3; echo y >&3",
    "truncate": "cp -r source c; truncate -s 10 c/text; truncate -s +5000 c/text; truncate -s 0 c/deep/3; : > c/deep/4",
    "sed -i": "cp -r source c; sed -i s/1/one/ c/text; sed -i.bak 2d c/text; perl -pi -e s/2/two/ c/text",
    "sort -o": "sort -rn source/text -o sorted; sort -n sorted -o sorted; split -l 3000 source/text part-",
    "patch": "cp source/text a; sed s/7/seven/ a > b; diff -u a b > d || true; patch -s a d; cmp a b; rm -f d a.orig",
    "rm -r": "cp -a source copy; chmod 700 copy/deep/er; rm -r copy; mkdir -p copy/x; rmdir copy/x copy; ! ls copy",
    "find -delete": "cp -r source c; find c -name '*[13]' -delete; find c -type d -empty -delete; find c -newer c | wc",
    "git": "git init -q r; cp source/text r; cd r; git add .; git -c user.name=a -c user.email=b commit -qm x;"
    "seq 9 >> text; git stash -q 2> /dev/null || true; git gc -q; git fsck --strict; cp text ..; cd ..; rm -rf r",
    "touch": "touch new; touch -d 2020-01-01 source/text; touch -r source/text new; mkdir -m 711 d; chmod a+x new",
    "ln": "ln source/text l; rm source/text; ln source/deep/1 m; rm source/deep/1; mv m source/deep/1",
    "python": f'{sys.executable} -c \'import shutil, tempfile, os; shutil.copytree("source", "c");'
    ' t = tempfile.NamedTemporaryFile(dir=".", delete=False); t.write(b"x" * 70000); t.close();'
    ' os.replace(t.name, "t");'
    ' shutil.rmtree("c/empty"); shutil.move("c", "e")\'',
}


def can_run(name: str) -> bool:
    """Whether the programs of a script are there."""
    needed = {"git": "git", "patch": "patch", "sed -i": "perl"}.get(name, "sh")
    return shutil.which(needed) is not None


@pytest.mark.interop
@pytest.mark.parametrize("name", SCRIPTS)
def test_tools_leave_what_they_leave_on_a_plain_directory(memory_mount: Path, plain: Path, name: str) -> None:
    if not can_run(name):
        pytest.skip("a program is missing")
    for directory in (memory_mount, plain):
        shell(SOURCE, directory)
        shell(SCRIPTS[name], directory)
    assert content(memory_mount, times=False) == content(plain, times=False)


@pytest.mark.interop
@pytest.mark.parametrize(
    "options", [["-a"], ["-a", "--inplace"], ["-a", "--delay-updates"], ["-a", "--checksum", "--partial"], ["-aWS"]]
)
def test_rsync_moves_nothing_the_second_time(memory_mount: Path, plain: Path, options: list[str]) -> None:
    if shutil.which("rsync") is None:
        pytest.skip("no rsync")
    aged = "find source -type d -exec touch -d 2003-03-03T03:03:03.123456789 {} +"  # rsync looks at their seconds alone
    shell(SOURCE + aged, plain)
    command = f"rsync {' '.join(options)} --itemize-changes {plain}/source/ target/"
    assert shell(command, memory_mount).stdout
    assert shell(command, memory_mount).stdout == ""
    assert content(memory_mount / "target") == content(plain / "source")
    shell(f"echo more >> source/text; rm source/deep/5; touch -d 2002-01-01 source/deep/6; {aged}", plain)
    shell(f"{command} --delete", memory_mount)
    assert content(memory_mount / "target") == content(plain / "source")


@pytest.mark.interop
@pytest.mark.parametrize(
    "settings", ["", "set backupcopy=yes backup undofile undodir=.", "set backupcopy=no writebackup"]
)
def test_vim(memory_mount: Path, plain: Path, settings: str) -> None:
    if shutil.which("vim") is None:
        pytest.skip("no vim")
    for directory in (memory_mount, plain):
        shell("seq 1000 > file; chmod 640 file", directory)
        shell(f"HOME=$PWD vim -es -u NONE -N -c 'set swapfile {settings[4:]}' -c '%s/5/five/' -c wq file", directory)
    assert content(memory_mount / ".", times=False)["file"] == content(plain, times=False)["file"]
    assert set(content(memory_mount)) == set(content(plain))


def test_modes_that_are_not_the_usual_ones_are_listed_and_found(memory_mount: Path) -> None:
    shell("umask 0; for m in 000 600 644 777; do install -m $m /dev/null f$m; done; mkdir -m 710 d", memory_mount)
    modes = {name: values[1][-3:] for name, values in content(memory_mount).items()}
    assert modes == {"f000": "000", "f600": "600", "f644": "644", "f777": "777", "d": "710"}


def test_who_mounts_is_who_owns(memory_mount: Path) -> None:
    run = shell("touch f; mkdir d; stat -c '%u %g %a' . f d; chown $(id -u):$(id -g) f d", memory_mount)
    own = f"{os.getuid()} {os.getgid()}"
    assert run.stdout.split("\n")[:3] == [f"{own} 755", f"{own} 644", f"{own} 755"]


def test_it_is_mounted_without_set_user_id_and_devices(memory_mount: Path) -> None:
    line = next(line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {memory_mount} " in line)
    options = set(line.split()[5].split(","))
    assert {"rw", "nosuid", "nodev"} <= options
    assert memory_mount in [entry.path for entry in mount_entries()]


def test_the_mount_itself_cannot_be_changed(memory_mount: Path) -> None:
    refused = [
        "touch .shardfs",
        "mkdir .shardfs",
        "touch .shardfs/new",
        "mv a .shardfs",
        "ln a .shardfs/b",
        "rm -r .shardfs",
    ]
    for command in refused:
        run = _run(["bash", "-c", f"touch a; {command}"], 10, cwd=memory_mount)
        assert run.returncode, command
        assert "Operation not permitted" in run.stderr or "File exists" in run.stderr or command.startswith("touch .sh")
    assert stat.S_ISDIR(memory_mount.stat().st_mode)
    assert list(content(memory_mount)) == ["a"]


def test_an_extended_attribute_has_the_tree_publish(memory_mount: Path) -> None:
    ask = "import os; os.setxattr('.', 'user.shardfs.flush', b'5'); print(os.getxattr('.', 'user.shardfs.state'))"
    run = _run([sys.executable, "-c", ask], 10, cwd=memory_mount)
    assert (run.returncode, run.stdout) == (0, "b'clean'\n"), run.stderr
