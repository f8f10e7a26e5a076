"""Updates that are repeated because another writer was faster."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from shardfs.model.errors import StaleShardError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.model.blobs import Stat


class Changed(Exception):
    """Another writer changed the object after it was read. The attempt to change it had no effect."""


def repeated(key: str, race_s: float, attempt: Callable[[], Stat | None], pause_s: float = 0.0) -> Stat | None:
    """Return the result of `attempt`, which is called again while it raises Changed.

    Raise StaleShardError after `race_s` seconds. A random pause of at most `pause_s` seconds follows each attempt, so
    that two writers do not collide again.
    """
    deadline = time.monotonic() + race_s
    while True:
        try:
            return attempt()
        except Changed:
            if time.monotonic() > deadline:
                why = f"other writers kept replacing it for {race_s:g} s; try again when they have ended"
                raise StaleShardError(f"{key}: {why}") from None
        time.sleep(random.uniform(0.0, pause_s))
