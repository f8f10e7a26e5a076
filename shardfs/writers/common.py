"""What writers have in common: what they are asked to make, and what they note for recovery."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from shardfs.model import Blob, Plan


class Begun(NamedTuple):
    """An update that is about to happen, for whoever finds its traces after a crash. JSON can carry it.

    Args:
        key: the object.
        base: what it was before, as its writer tells versions apart; None if it was not there.
        temp: the file, beside the object, in which the new one was made and the old one is found later; "" if none.
        temp_ino: the inode number of the new one; 0 if the object is to be removed.
    """

    key: str
    base: Any
    temp: str = ""
    temp_ino: int = 0


Make = Callable[[Blob | None], Plan | None]
"""Of the object as it is (None: absent), what it shall be (None: gone)."""


def nobody(_: Any) -> None:
    """Who is not interested."""
