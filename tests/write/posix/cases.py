"""How cases are written down and run."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Case: TypeAlias = Callable[[Path], None]

CASES: dict[str, Case] = {}
"""By name: `call/what`. Each is given an empty directory of its own."""

TICK_S = 0.02
"""Longer than the clock of any file system stands still."""


def case(name: str) -> Callable[[Case], Case]:
    def register(function: Case) -> Case:
        if name in CASES:
            raise ValueError(f"two cases {name}")
        CASES[name] = function
        return function

    return register


def fails(number: int | Sequence[int], call: Callable[..., object], *args: Any, **options: Any) -> None:
    """The call must fail with this errno, or one of these."""
    wanted = [number] if isinstance(number, int) else list(number)
    try:
        call(*args, **options)
    except OSError as e:
        if e.errno not in wanted:
            raise AssertionError(f"{errno.errorcode[e.errno or 0]}, not {_names(wanted)}") from e
        return
    raise AssertionError(f"success, not {_names(wanted)}")


def _names(numbers: Sequence[int]) -> str:
    return " or ".join(errno.errorcode[n] for n in numbers)


def same(actual: object, wanted: object) -> None:
    if actual != wanted:
        raise AssertionError(f"{actual!r}, not {wanted!r}")


def opened(path: str | Path, flags: int = os.O_RDONLY, mode: int = 0o644) -> None:
    os.close(os.open(path, flags, mode))


def file(path: Path, data: bytes = b"content") -> Path:
    path.write_bytes(data)
    return path


def changes(path: Path, action: Callable[[], object], *, is_changed: bool = True, ctime: bool = True) -> None:
    """Whether the action moves the times of something."""
    before = os.lstat(path)
    time.sleep(TICK_S)
    action()
    after = os.lstat(path)
    moved = after.st_mtime_ns != before.st_mtime_ns or (ctime and after.st_ctime_ns != before.st_ctime_ns)
    if moved != is_changed:
        raise AssertionError(f"the times of {path.name} have {'' if moved else 'not '}changed")


def names_too_long(make: Callable[[Path], object], where: Path) -> None:
    """A component of 255 bytes is the longest, a path of 4,095 the longest."""
    make(where / ("x" * 255))
    fails(errno.ENAMETOOLONG, make, where / ("x" * 256))
    fails(errno.ENAMETOOLONG, make, Path(f"{where}/" + "d/../" * 900 + "x"))


def run(directory: Path, prefixes: Sequence[str] = ()) -> dict[str, str]:
    """What failed, and why."""
    os.umask(0o022)
    failed = {}
    for name, function in CASES.items():
        if prefixes and not name.startswith(tuple(prefixes)):
            continue
        where = Path(tempfile.mkdtemp(prefix="case-", dir=directory))
        try:
            function(where)
        except (AssertionError, OSError) as e:
            failed[name] = f"{type(e).__name__}: {e}"
        finally:
            os.umask(0o022)
            shutil.rmtree(where, ignore_errors=True)
            if where.exists():
                failed.setdefault(name, "its directory cannot be removed")
    return failed
