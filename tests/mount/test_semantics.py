"""docs/semantics.md, call by call."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests.datasets import ROOT
from tests.mount.programs import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import Mounted
    from tests.datasets import Dataset

    Get = Callable[[str, str], Dataset]

REFUSED = {
    "open O_RDONLY|O_CREAT": "ok",  # it exists
    "open O_RDWR": "EROFS",
    "open O_WRONLY|O_TRUNC": "EROFS",
    "open O_WRONLY|O_APPEND": "EROFS",
    "open O_TMPFILE": "EROFS",
    "open O_DIRECTORY of a file": "ENOTDIR",
    "create": "EROFS",
    "open of nothing": "ENOENT",
    "open below a file": "ENOTDIR",
    "open of a long name": "ENAMETOOLONG",
    "read of a directory": "EISDIR",
    "copy_file_range": "EXDEV",
    "reflink": "EXDEV",
    "fcntl write lock": "EBADF",  # needs a descriptor that can write
    "ioctl": "ENOTTY",
    "ftruncate": "EINVAL",
    "mkdir": "EROFS",
    "mkdir of what exists": "EEXIST",
    "mknod": "EROFS",
    "bind": "EROFS",
    "symlink": "EROFS",
    "link": "EROFS",
    "link elsewhere": "EXDEV",
    "rename": "EROFS",
    "rename elsewhere": "EXDEV",
    "unlink": "EROFS",
    "rmdir": "EROFS",
    "chmod": "EROFS",
    "chown": "EROFS",
    "utimensat": "EROFS",
    "truncate": "EROFS",
    "setxattr": "EROFS",
    "removexattr": "EROFS",
    "getxattr of nothing": "ENODATA",
    "getxattr of an ACL": "ENOTSUP",
    "readlink": "EINVAL",
    "execve": "EACCES",
}
"""All others succeed."""


@pytest.mark.parametrize("words", ["ro", "direct_io", "default_permissions"])
def test_every_call(words: str, dataset: Get, mounted: Mounted, tmp_path: Path) -> None:
    source = dataset("zarr3", "default").path
    with mounted(source, "-o", words) as mount:
        chunk = next(path for path in mount.rglob("*") if path.parent != mount and path.is_file())
        told = run(sys.executable, "-m", "tests.mount.calls", mount, chunk, tmp_path, cwd=ROOT)
    outcomes = json.loads(told)
    assert REFUSED.keys() <= outcomes.keys()
    assert {name: told for name, told in outcomes.items() if told != REFUSED.get(name, "ok")} == {}
