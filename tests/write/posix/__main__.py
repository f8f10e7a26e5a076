"""See the package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.write.posix import cases, files, listing, names  # noqa: F401 - they register what they have

if __name__ == "__main__":
    failed = cases.run(Path(sys.argv[1]), sys.argv[2:])
    print(json.dumps({"ran": len(cases.CASES), "failed": failed}))
