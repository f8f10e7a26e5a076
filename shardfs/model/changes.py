"""What an update does to one object of a store (`Change`), and the note that recovery needs of it (`Begun`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from shardfs.model.blobs import Blob, ByteRange, Plan, whole
from shardfs.model.write_plan import pieces_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardfs.model.blobs import ByteRequest, Content

FIRST = ByteRange(0, 8 << 20)
"""What the first request for an object fetches. Most shards are no larger, so one request fetches them whole."""

UNREAD = ByteRange(0, 0)
"""For changes that need no byte of the old object."""


class Begun(NamedTuple):
    """The recovery note of an update that is about to switch versions. Its fields can be stored as JSON.

    Args:
        key: the object.
        base: the version that is replaced, in the writer's own notation; None if the object did not exist.
        temp: the name of the temporary file beside the object, or the id of a multipart upload; "" if there is none.
            After the switch, the temporary file holds the old version.
        temp_ino: the inode number of the new version in the temporary file; 0 if the object is to be removed.
        head: the number of bytes at the beginning that a change in place may rewrite; 0 if the object is replaced.
    """

    key: str
    base: Any
    temp: str = ""
    temp_ino: int = 0
    head: int = 0

    @classmethod
    def from_json(cls, meta: Mapping[str, Any]) -> Self:
        """Rebuild a note from its `_asdict` form. Fields that an earlier version did not write get their defaults."""
        return cls(**{name: meta[name] for name in cls._fields if name in meta})


class Change(Protocol):
    """What an update does to one object. Only `plan` must be defined.

    `first`: what `plan` will probably read of a remote object; `UNREAD` receives no byte of it. None: the object is
    expected to be absent, and `plan` does not need it. An object that was expected wrongly costs more requests.

    `in_place`: the size in bytes of the units in which a local file may be changed in place; 0 always replaces it. A
    change in place needs a plan of three parts: new bytes for the beginning, the unchanged rest, and appended pieces.
    The beginning is written last, one unit at a time in any order. A crash may leave a mix of old and new units, and
    unused bytes at the end.
    """

    @property
    def first(self) -> ByteRequest | None:
        return FIRST

    @property
    def in_place(self) -> int:
        return 0

    def plan(self, old: Blob | None) -> Plan | None:
        """Return the plan of the new object, given the current one (None: absent). None removes the object.

        Called again, with the current object, when another writer changes the object.
        """

    def verify(self, new: Blob) -> None:
        """Raise ValueError if the new object, which is not in place yet, is invalid."""
        return

    def begun(self, note: Begun) -> None:
        """Called when everything is prepared, right before the switch. After a crash, `Writer.recover` needs `note`."""
        return


@dataclass
class Whole(Change):
    """Make the object have this content, whatever its current version is."""

    content: Content
    first: ByteRequest | None = UNREAD

    def plan(self, old: Blob | None) -> Plan:
        return pieces_of(self.content)


@dataclass
class Rewrite(Change):
    """Give a small object the content that `content` returns for its present one; None: there is none, or remove it."""

    content: Callable[[bytes | None], bytes | None]

    def plan(self, old: Blob | None) -> Plan | None:
        content = self.content(None if old is None else whole(old))
        return None if content is None else [content]


@dataclass
class Removal(Change):
    """Remove the object. `existed`: whether there was one."""

    existed: bool = False
    first = UNREAD

    def plan(self, old: Blob | None) -> None:
        self.existed |= old is not None
