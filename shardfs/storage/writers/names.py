"""Names of objects: which keys are refused, and how temporary objects are named."""

from __future__ import annotations

import errno
import re
import secrets


def require_inside(key: str) -> None:
    """Raise PermissionError if a key has parts such as `..`, which could lead out of the source."""
    if (key and {"", ".", ".."} & set(key.split("/"))) or "\0" in key:
        raise PermissionError(errno.EACCES, "is not the path of a file in the source; remove `.`, `..` and `//`", key)


_TEMPORARY = re.compile(r"\.shardfs-[0-9a-f]{16}\.tmp")


def temporary_name() -> str:
    """Return a random name for a temporary file or object."""
    return f".shardfs-{secrets.token_hex(8)}.tmp"


def is_temporary(name: str) -> bool:
    """Return whether the name is one of `temporary_name`."""
    return _TEMPORARY.fullmatch(name) is not None
