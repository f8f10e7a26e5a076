"""What the tests of real mounts share: programs with time-outs, and trees to mount."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tests import conftest
from tests.conftest import client_python, run_client
from tests.datasets import ROOT
from tests.mount.processes import end as end
from tests.write.scale import times

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Sequence

    from tests.datasets import Array, Client, Dataset

Wanted = TypeVar("Wanted")

READERS: dict[Client, str] = {
    "tensorstore": "read_tensorstore",
    "zarr3": "read_zarr3",
    "dask": "read_dask",
    "z5": "read_z5",
    "cloudvolume": "read_cloudvolume",
}

PLAIN_ENVIRONMENT = {**os.environ, "LC_ALL": "C.UTF-8", "TZ": "UTC", "QUOTING_STYLE": "literal"}


def attempt(*command: str | Path, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program of the system, whatever its exit status."""
    return conftest._run(list(command), timeout, **{"env": PLAIN_ENVIRONMENT, **options})


def run(*command: str | Path, timeout: float = 60, **options: Any) -> str:
    """The output of a program that must succeed and say nothing on standard error."""
    completed = attempt(*command, timeout=timeout, **options)
    assert completed.returncode == 0, f"{command}: status {completed.returncode}\n{completed.stdout}{completed.stderr}"
    assert completed.stderr == "", f"{command}: {completed.stderr}"
    return completed.stdout


def lines(*command: str | Path, **options: Any) -> list[str]:
    """The sorted lines that a program writes."""
    return sorted(run(*command, **options).splitlines())


def shardfs(*arguments: str | Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    python = sys.executable
    return conftest._run([python, "-m", "shardfs", *arguments], timeout, cwd=ROOT)


def status(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`shardfs status` of a mount that answers, or is dead. On a busy machine that may take longer than it is given."""
    for _ in range(30):
        completed = shardfs("status", *arguments)
        if not any(words in completed.stdout for words in ("does not answer", '"state": "hangs"')):
            break
    return completed


def link_tree(source: Path, target: Path) -> Path:
    """The same files once more, by hard links: contents and times without the cost of copying."""
    shutil.copytree(source, target, copy_function=os.link)
    return target


def copy_tree(source: Path, target: Path) -> Path:
    """A tree of its own, to be changed."""
    shutil.copytree(source, target)
    return target


def read_many(client: Client, wanted: Iterable[tuple[Dataset, str, Path]], scratch: Path) -> list[Array | str]:
    """What one process of `client` reads: for each dataset, member and root an array, or the message of its failure."""
    jobs = [_arguments(client, *one) for one in wanted]
    return read_jobs(READERS[client], jobs, scratch, client_python("cv") if client == "cloudvolume" else None)


def read_jobs(
    reader: str, arguments: Iterable[Sequence[Any]], scratch: Path, python: Path | None = None
) -> list[Array | str]:
    """The same for any reader below `tests.clients`: what its function `read` returns, each time it is called."""
    jobs: list[dict[str, Any]] = []
    for number, job_arguments in enumerate(arguments):
        out, failed = scratch / f"{number}.npy", scratch / f"{number}.failed"
        jobs.append({"arguments": list(job_arguments), "out": str(out), "failed": str(failed)})
    (scratch / "jobs.json").write_text(json.dumps(jobs))
    run_client("read_many", reader, scratch / "jobs.json", python=python or sys.executable, timeout=250)
    return [outcome_of(Path(job["out"]), Path(job["failed"])) for job in jobs]


def _arguments(client: Client, dataset: Dataset, member: str, root: Path) -> list[Any]:
    """Of the function `read` of the client."""
    if client == "cloudvolume":
        return [str(root), int(member), dataset.fill_missing]
    if client != "tensorstore":
        return [str(root), member]
    if dataset.format == "precomputed":
        return ["neuroglancer_precomputed", str(root), int(member)]
    return ["zarr3", str(root / member), None]


def outcome_of(out: Path, failed: Path) -> Array | str:
    if failed.exists():
        return failed.read_text()
    if not out.exists():
        return "the client ended before"
    array: Array = np.load(out)
    return array


def dealt(wanted: Sequence[Wanted], client: str, clients: Sequence[str]) -> list[Wanted]:
    """The share of one of several clients that read the same files; each reads all where tests marked `torture` run."""
    mixed = random.Random(0).sample(wanted, len(wanted))
    return mixed if times() > 1 else mixed[clients.index(client) :: len(clients)]


def errno_of(call: Callable[[], object]) -> int | None:
    try:
        call()
    except OSError as error:
        return error.errno
    return None
