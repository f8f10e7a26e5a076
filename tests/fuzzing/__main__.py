"""Fuzzes targets with atheris, one after the other, each with what it has learned before.

Needs atheris, which exists for Linux and some versions of Python only. Code that an input reached in the package guides
atheris. Inputs that reached new code are kept in the directory SHARDFS_FUZZ_CORPUS, or `.fuzz` beside the sources.
Inputs that fail a target are stored there below `found`: `python -m tests.fuzzing TARGET FILE...` repeats such files,
without atheris.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from tests.datasets import ROOT

RSS_MIB = 1024
HANGS_S = 60
"""Of wall clock, when an input is given up; `guided.SECONDS` of the processor fail it."""

LONGEST = 8192
SEEDS = 32


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="TARGET", help="by default all; then files, which are tried again")
    parser.add_argument("--seconds", type=int, default=600, help="of each target (600)")
    parser.add_argument("--list", action="store_true", help="the names of all targets")
    args = parser.parse_args()
    from tests.fuzzing.targets import TARGETS

    if args.list:
        print("\n".join(TARGETS))
        return 0
    names, inputs = [n for n in args.names if n in TARGETS], [Path(n) for n in args.names if n not in TARGETS]
    if missing := [str(file) for file in inputs if not file.exists()]:
        parser.error(f"neither a target nor a file: {', '.join(missing)}")
    if inputs:
        return _again(names, inputs)
    if find_spec("atheris") is None:
        print("atheris is not installed: pip install atheris", file=sys.stderr)
        return 2
    return sum([fuzz(name, args.seconds) for name in names or TARGETS]) and 1


def _again(names: list[str], inputs: list[Path]) -> int:
    """Raise what these inputs raise in a target."""
    from tests.fuzzing.targets import TARGETS, as_hypothesis

    for name, file in product(names, inputs):
        print(f"{name}: {file}", flush=True)
        as_hypothesis(TARGETS[name], 1).hypothesis.fuzz_one_input(file.read_bytes())  # type: ignore[attr-defined]
    return 0


def fuzz(target: str, seconds: int) -> int:
    """How many inputs failed it; what was done is printed as one line."""
    top = Path(os.environ.get("SHARDFS_FUZZ_CORPUS") or ROOT / ".fuzz")
    corpus, findings = top / target, top / "found" / target
    for directory in (corpus, findings):
        directory.mkdir(parents=True, exist_ok=True)
    if not any(corpus.iterdir()):
        for i in range(SEEDS):
            (corpus / f"seed{i}").write_bytes(os.urandom(LONGEST // 2))
    before = set(findings.iterdir())
    limits = [f"-rss_limit_mb={RSS_MIB}", f"-timeout={HANGS_S}", f"-max_total_time={seconds}", f"-max_len={LONGEST}"]
    more = ["-len_control=0", f"-report_slow_units={HANGS_S}", f"-artifact_prefix={findings}/"]
    command = [sys.executable, "-m", "tests.fuzzing.guided", target, str(findings), *limits, *more, str(corpus)]
    log = top / f"{target}.log"
    with log.open("w") as out:
        status = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, check=False).returncode
    failed = sorted(set(findings.iterdir()) - before)
    print(f"{target}: {_told(log.read_text(errors='replace'), status)}, {len(failed)} failed; see {log}", flush=True)
    for file in failed:
        print(f"  {file}")
    return len(failed) + (status != 0)


def _told(log: str, status: int) -> str:
    totals = re.findall(r"^Done (\d+) runs in (\d+) second", log, re.MULTILINE)
    reached = re.findall(r"^#\d+\s.*cov: (\d+) ft: \d+ corp: (\d+)", log, re.MULTILINE)
    if not totals or not reached:
        return f"ended with status {status}"
    (runs, took), (edges, size) = totals[-1], reached[-1]
    return f"{runs} inputs in {took} s, {edges} edges reached, {size} inputs kept"


if __name__ == "__main__":
    sys.exit(main())
