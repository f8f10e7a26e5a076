"""Several trees in one process, for start-up costs more than reading: `read_many READER JOBS.json`.

A job has `arguments` for the function `read` of `tests.clients.<READER>`, a file `out` for the array and a file
`failed` for the message if there is none. One failure does not stop the others.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

import numpy as np


def main(reader: str, jobs: str) -> None:
    read = importlib.import_module(f"tests.clients.{reader}").read
    for job in json.loads(Path(jobs).read_text()):
        try:
            np.save(job["out"], np.asarray(read(*job["arguments"])))
        # Whatever a library raises, the test that started this process must see it; BaseException: Rust code panics.
        except BaseException as error:  # noqa: BLE001
            traceback.print_exc()
            Path(job["failed"]).write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
