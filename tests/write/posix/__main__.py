"""See the package."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.write.posix import cases, files, listing, names  # noqa: F401 - they register what they have


def main(directory: Path, prefixes: list[str]) -> dict[str, object]:
    return {"ran": len(cases.CASES), "failed": cases.run(directory, prefixes)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])))
