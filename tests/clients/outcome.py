"""How a client reports: the array goes to a file, a failure to standard output as one line of JSON."""

from __future__ import annotations

import json
import sys
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable


def report(read: Callable[[], npt.NDArray[Any]], out: str) -> None:
    """Save what `read` returns; on any failure print a JSON line and leave with status 1."""
    try:
        array = np.asarray(read())
        np.save(out, array)
    # Whatever a library raises, the test that started this process must see it; BaseException: Rust code panics.
    except BaseException as error:  # noqa: BLE001
        traceback.print_exc()
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
        sys.exit(1)
