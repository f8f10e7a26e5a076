"""The state of a job that packs or unpacks a local source in place: its names in the source, and how far it is."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from shardfs.model.errors import BusyError

if TYPE_CHECKING:
    from collections.abc import Mapping

STATE = ".shardfs-pack.json"
"""Describes an unfinished job: at the root of the source of a job in place, else at the root of the target."""

DIRECTORY = ".shardfs-pack"
"""The files of a job in place, at the root of its source."""

PLAIN = f"{DIRECTORY}/plain"
"""The documents of the dataset whose chunks are plain files, under the names that they have in the source."""

SHARDED = f"{DIRECTORY}/sharded"
"""The documents of the sharded dataset and its finished shards, under the names that they have in the source."""

PACK, UNPACK = "pack", "unpack"
"""Commands, and directions of a job."""


class Stage(StrEnum):
    """How far a job in place is. Packing goes from PLAIN to SHARDED, unpacking the reverse way; `ROUTES` has all steps.

    - BEGUN: the source is unchanged. The job writes the documents of the form that the source does not have yet.
    - PLAIN: every chunk is a plain file. Documents of plain files are in the source or in `PLAIN`.
    - MIXED: no document is in the source. A chunk is in its shard in `SHARDED` if that shard exists, else a plain file.
    - SHARDED: every chunk is in a shard. Documents and shards are in the source or in `SHARDED`.
    - DONE: the source is complete. The job removes `DIRECTORY`.
    """

    BEGUN = "begun"
    PLAIN = "plain"
    MIXED = "mixed"
    SHARDED = "sharded"
    DONE = "done"


ROUTES: Mapping[str, list[Stage]] = {
    PACK: [Stage.BEGUN, Stage.PLAIN, Stage.MIXED, Stage.SHARDED, Stage.DONE],
    UNPACK: [Stage.BEGUN, Stage.SHARDED, Stage.MIXED, Stage.PLAIN, Stage.DONE],
}


@dataclass(frozen=True, slots=True)
class PackState:
    """The content of `STATE` in the source of a job in place.

    Args:
        command: the command that began the job, PACK or UNPACK.
        direction: where the job goes, PACK or UNPACK. `--abort` reverses it.
        plain, sharded: the paths of all documents of both forms.
        options: the options of the command, as JSON.
    """

    command: str
    direction: str
    stage: Stage
    plain: list[str]
    sharded: list[str]
    options: Any

    def after(self) -> Stage:
        """The stage that follows in this direction."""
        route = ROUTES[self.direction]
        return route[route.index(self.stage) + 1]

    def raw(self) -> bytes:
        """The state as a file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, root: str) -> Self | None:
        """Return the state in the directory of a source; None if there is none.

        Raise FileExistsError if the file describes another kind of job, or is missing although `DIRECTORY` exists.
        """
        try:
            with open(os.path.join(root, STATE), "rb") as file:
                found = json.loads(file.read())
        except FileNotFoundError:
            if os.path.lexists(os.path.join(root, DIRECTORY)):
                why = f"contains {DIRECTORY} of a job in place, but {STATE} is missing: bring that file back"
                raise FileExistsError(errno.EEXIST, why, root) from None
            return None
        except ValueError as e:
            raise FileExistsError(errno.EEXIST, f"{STATE} is damaged ({e}): bring back the file", root) from e
        if not isinstance(found, dict) or "stage" not in found:
            why = "is the target of an unfinished pack or unpack; repeat that command first"
            raise FileExistsError(errno.EEXIST, why, root)
        return cls(**{**found, "stage": Stage(found["stage"])})


def require_settled(root: str, path: str) -> None:
    """Raise BusyError if the directory `path` below a source has an unfinished job: its files alone are incomplete."""
    if path and os.path.lexists(os.path.join(root, path, STATE)):
        raise BusyError(errno.EBUSY, "has an unfinished pack or unpack; end that job first", path)
