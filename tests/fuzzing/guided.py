"""One target under atheris, which keeps inputs that reach something new in the package and changes them.

`python -m tests.fuzzing.guided TARGET FOUND [flags and directories of libFuzzer]`; see `__main__.py`, which calls it.
An input that fails the target, or takes too long, is put into the directory FOUND, once for each place where it failed,
and the search goes on. Time is that of the processor, which others may be busy with as well.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import pkgutil
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 5.0


class TooLongError(Exception):
    """An input took more than SECONDS."""


def main(target: str, directory: Path, flags: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["shardfs"]):
        package = importlib.import_module("shardfs")
        for module in pkgutil.walk_packages(package.__path__, "shardfs."):
            if module.name != "shardfs.__main__":
                importlib.import_module(module.name)
    from tests.fuzzing.targets import TARGETS, as_hypothesis

    logging.disable()  # of damage there is much to tell
    one = as_hypothesis(TARGETS[target], 1).hypothesis.fuzz_one_input  # type: ignore[attr-defined]
    atheris.Setup([target, *flags], Search(one, directory))
    atheris.Fuzz()


class Search:
    """Calls the target, and keeps what fails it."""

    def __init__(self, one: Callable[[bytes], object], directory: Path) -> None:
        self._one, self._found = one, directory

    def __call__(self, data: bytes) -> None:
        try:
            start_s = time.process_time()
            self._one(data)
            if (took := time.process_time() - start_s) > SECONDS:
                raise TooLongError(f"{took:.1f} s of the processor")
        except Exception as e:  # noqa: BLE001 - kept, and told with its traceback
            self._keep(data, e)

    def _keep(self, data: bytes, error: Exception) -> None:
        stack = traceback.extract_tb(error.__traceback__)
        where = [f"{frame.filename}:{frame.lineno}" for frame in stack if "/hypothesis/" not in frame.filename]
        name = hashlib.sha1(f"{type(error).__name__} {where}".encode()).hexdigest()[:12]
        file = self._found / f"{name}-{type(error).__name__}"
        if not file.exists():
            file.write_bytes(data)
            traceback.print_exception(error)
            print(f"found: {file}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
