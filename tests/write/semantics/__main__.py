"""See the package."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.write.semantics import cases, files, kinds  # noqa: F401 - they register what they have

if __name__ == "__main__":
    os.umask(0o022)
    mount, below = map(Path, sys.argv[1:3])

    def source(path: str) -> bytes | None:
        return (below / path).read_bytes() if (below / path).exists() else None

    os.chdir(mount)
    failed = cases.run(os, source, cases.CASES)
    print(json.dumps({"ran": len(cases.CASES), "failed": failed}))
