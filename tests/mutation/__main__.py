"""Try mutants: `scripts/mutate` runs this in a copy of the checkout."""

from __future__ import annotations

import argparse
import difflib
import gc
import os
import re
import signal
import sys
import tempfile
import time
import tomllib
import zlib
from collections import defaultdict
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cosmic_ray.mutating import use_mutation
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult

from tests.mutation.operators import mutants

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONFIG = Path(__file__).with_name("files.toml")
IMPORTED = (
    "anyio.pytest_plugin", "fsspec.implementations.memory", "hypothesis", "moto.server", "numcodecs", "numpy.testing",
    "obstore.store", "pytest_timeout", "s3fs", "tensorstore", "xdist.plugin", "z5py", "zarr.testing.store",
)  # fmt: skip
"""What tests import, which takes longer than most of them. None of these modules starts a thread."""

OPTIONS = (
    "-xq",
    "--no-header",
    "-pno:cacheprovider",
    "-mnot slow and not interop and not s3 and not fuse",
    "-Wignore::pytest.PytestAssertRewriteWarning",
)

SECONDS = 300.0
"""For the tests of one mutant. A test that does not end has found it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="all files of files.toml by default")
    parser.add_argument("--session", required=True)
    parser.add_argument("--sample", type=int, help="mutants of each file; all by default")
    parser.add_argument("--seed", type=int, default=0, help="for the choice of the sample")
    parser.add_argument("--again", action="store_true", help="those that no test has found")
    parser.add_argument("--trust", action="store_true", help="do not run the tests without a mutant first")
    parser.add_argument("--report", action="store_true", help="only print the outcomes until now")
    options = parser.parse_args()
    config = tomllib.loads(CONFIG.read_text())
    explained = {entry["mutant"]: entry["why"] for entry in config.get("explained", ())}
    with use_db(options.session) as db:
        if options.report:
            report(db, explained)
            return 0
        for name in IMPORTED:
            import_module(name)
        gc.freeze()  # a collection would copy all pages of what was imported
        files = options.files or list(config["tests"])
        renew(db, files)
        verdicts = dict(db.results)
        survivors = 0
        for path in files:
            work = {mutant.job_id: mutant for mutant in db.work_items if str(mutant.mutations[0].module_path) == path}
            names = sorted(work, key=lambda name: zlib.crc32(f"{options.seed} {name}".encode()))[: options.sample]
            if options.again:
                names = [name for name in work if name in verdicts and not verdicts[name].is_killed]
            todo = [work[name] for name in names if options.again or name not in verdicts]
            if todo and not options.trust and (failed := failing(config["tests"][path])):
                raise SystemExit(f"{path}: a test fails without any mutant: {failed}")
            survivors += sum(try_all(db, todo, config["tests"][path], explained))
    return int(survivors > 0)


def renew(db: WorkDB, files: Sequence[str]) -> None:
    """Put the present mutants of these files into the session, with the outcomes of those that it had before."""
    verdicts = dict(db.results)
    work = [mutant for mutant in db.work_items if str(mutant.mutations[0].module_path) not in files]
    work += [mutant for path in files for mutant in mutants(path)]
    db.clear()
    db.add_work_items(work)
    for mutant in work:
        if mutant.job_id in verdicts:
            db.set_result(mutant.job_id, verdicts[mutant.job_id])


def try_all(db: WorkDB, work: Sequence[WorkItem], tests: Sequence[str], explained: Mapping[str, str]) -> list[bool]:
    """Try mutants of one file. Return of each whether it survived without an explanation."""
    survived = []
    for mutant in work:
        begin = time.monotonic()
        verdict = outcome(mutant, tests)
        db.set_result(mutant.job_id, verdict)
        survived.append(not verdict.is_killed and mutant.job_id not in explained)
        word = verdict.test_outcome.value if verdict.test_outcome else verdict.worker_outcome.value
        print(f"{time.monotonic() - begin:5.1f} s  {word:9} {mutant.job_id}  {verdict.output}", flush=True)
    return survived


def outcome(mutant: WorkItem, tests: Sequence[str]) -> WorkResult:
    """Put a mutant into its file, and run tests in a new process."""
    mutation = mutant.mutations[0]
    operator = get_operator(mutation.operator_name)()
    with use_mutation(mutation.module_path, operator, mutation.occurrence) as (before, after):
        diff = "\n".join(
            difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", "", "", 1, "")
        )
        forget_compiled(mutation.module_path)
        failed = failing(tests)
    forget_compiled(mutation.module_path)
    killed = TestOutcome.KILLED if failed else TestOutcome.SURVIVED
    return WorkResult(WorkerOutcome.NORMAL, failed, killed, diff)


def forget_compiled(path: Path) -> None:
    """Remove the compiled form of a module, which Python might take for that of another mutant of the same second."""
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def failing(tests: Sequence[str]) -> str:
    """Run tests in a fork, which need not import what this process has; return the first one that fails, "" if none."""
    with tempfile.TemporaryDirectory(prefix="shardfs-mutant-") as directory:
        pid = os.fork()
        if pid == 0:
            _run(tests, Path(directory))
        end, status = time.monotonic() + SECONDS, None
        while status is None and time.monotonic() < end:
            ended, code = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else None
            time.sleep(0.02)
        with suppress(ProcessLookupError):  # with the processes that tests have left
            os.killpg(pid, signal.SIGKILL)
        if status is None:
            os.waitpid(pid, 0)
            return "the tests do not end"
        said = Path(directory, "out").read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    return failed[1] if failed else "" if status == 0 else f"status {status}: {said[-300:]}"


def _run(tests: Sequence[str], directory: Path) -> None:
    os.setsid()
    with (directory / "out").open("wb") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    options = [*OPTIONS, f"--basetemp={directory / 'tmp'}"]
    code = 1
    try:
        codes = (int(pytest.main([*options, file])) for file in tests)
        code = next((code for code in codes if code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED)), 0)
    finally:
        sys.stdout.flush()
        os._exit(code)


def report(db: WorkDB, explained: Mapping[str, str]) -> None:
    """Print a table of the outcomes by file, and the survivors."""
    tried = defaultdict[str, list[tuple[WorkItem, WorkResult]]](list)
    total = defaultdict[str, int](int)
    for mutant in db.work_items:
        total[str(mutant.mutations[0].module_path)] += 1
    for mutant, verdict in db.completed_work_items:
        tried[str(mutant.mutations[0].module_path)].append((mutant, verdict))
    print("| file | mutants | tried | found | explained | left |\n|---|---|---|---|---|---|")
    for path, outcomes in sorted(tried.items()):
        killed = sum(verdict.is_killed for _, verdict in outcomes)
        accounted = sum(not verdict.is_killed and mutant.job_id in explained for mutant, verdict in outcomes)
        unexplained = len(outcomes) - killed - accounted
        print(f"| `{path}` | {total[path]} | {len(outcomes)} | {killed} | {accounted} | {unexplained} |")
    for path, outcomes in sorted(tried.items()):
        for mutant, verdict in outcomes:
            if not verdict.is_killed:
                line = mutant.mutations[0].start_pos[0]
                print(f"\n{path}:{line} {explained.get(mutant.job_id, '')}\n{mutant.job_id}\n{verdict.diff}")


if __name__ == "__main__":
    sys.exit(main())
