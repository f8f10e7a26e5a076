"""The first process of a private namespace (see namespace.py): prepares it, starts a service manager if one is wanted,
and keeps it alive until standard input ends. Runs as `python -m tests.mount.inside SCRATCH CGROUP...`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COVERED = ("/run", "/etc/systemd/system", "/usr/local/share")
"""Directories that are empty in there, and that may be written to."""


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


def cover(scratch: Path) -> None:
    mount("-t", "proc", "proc", "/proc")
    for path in COVERED:
        if os.path.isdir(path):
            mount("-t", "tmpfs", "tmpfs", path)
    # The programs that are in /sbin stay there, and others can be put beside them.
    real, sbin = scratch / "sbin", os.path.realpath("/sbin")
    real.mkdir()
    mount("--bind", sbin, real)
    mount("-t", "tmpfs", "tmpfs", sbin)
    for name in os.listdir(real):
        os.symlink(real / name, f"{sbin}/{name}")


def start_manager() -> subprocess.Popen[bytes]:
    Path("/run/systemd/system").mkdir(parents=True)  # for it and its tools: this machine runs systemd
    runtime = Path(os.environ["XDG_RUNTIME_DIR"])
    runtime.mkdir(parents=True, mode=0o700)
    null = subprocess.DEVNULL
    # A session of its own: autofs is told the process group, and that of the tests has no number in here.
    command = ["/lib/systemd/systemd", "--user"]
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)


def main(scratch: Path, cgroups: list[str]) -> None:
    # The manager moves whatever is in its cgroup about, so it must have one of its own.
    for path in cgroups:
        Path(path, "cgroup.procs").write_text("0")
    cover(scratch)
    if cgroups:
        start_manager()
    print("ready", flush=True)
    reader = os.fork()
    if reader == 0:
        sys.stdin.read()
        os._exit(0)
    while os.wait()[0] != reader:  # daemons become children of the first process
        pass
    # With it everything in here ends.


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
