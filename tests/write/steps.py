"""Changes of objects that tests make of functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardfs.model.changes import FIRST, Change

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.model.blobs import Blob, ByteRequest, Plan
    from shardfs.model.changes import Begun


def nobody(_: object) -> None:
    """Told of a step, it does nothing."""


@dataclass
class Steps(Change):
    """A change whose steps are these functions; see `Change`."""

    make: Callable[[Blob | None], Plan | None]
    tell: Callable[[Begun], object] = nobody
    check: Callable[[Blob], object] = nobody
    in_place: int = 0
    first: ByteRequest | None = FIRST

    def plan(self, old: Blob | None) -> Plan | None:
        return self.make(old)

    def verify(self, new: Blob) -> None:
        self.check(new)

    def begun(self, note: Begun) -> None:
        self.tell(note)
