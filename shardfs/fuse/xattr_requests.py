"""Requests that read extended attributes: GETXATTR, LISTXATTR."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from shardfs.fuse import control, protocol
from shardfs.model.version import __version__
from shardfs.vfs.inodes import ROOT

if TYPE_CHECKING:
    from shardfs.fuse.device import Device, Handler
    from shardfs.model.file_tree import FileTree

_USAGE = ("user.shardfs.live", "user.shardfs.dead")
"""Attributes that read each index of an array. LISTXATTR omits them, so that `cp -a` does not ask for them."""

_CAPABILITIES = b"security.capability"


class XattrRequests:
    """GETXATTR and LISTXATTR, for one thread."""

    def __init__(self, tree: FileTree, device: Device) -> None:
        self._tree, self._device, self._request = tree, device, device.request

    def handlers(self) -> dict[int, Handler]:
        return {protocol.GETXATTR: self._get, protocol.LISTXATTR: self._list}

    def _get(self, unique: int, number: int, size: int) -> None:
        start = protocol.BODY + protocol.GETXATTR_IN.size
        if self._request[start : size - 1] == _CAPABILITIES:  # the kernel asks before the first write to a file
            self._device.tally.errors[protocol.GETXATTR, errno.EOPNOTSUPP] += 1
            self._device.send(protocol.error(unique, errno.EOPNOTSUPP))
            return
        name = os.fsdecode(bytes(self._request[start : size - 1]))
        if not name.startswith("user."):
            # ENODATA would be true as well, but after EOPNOTSUPP `ls -l` stops asking every file for its ACL.
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), name)
        value = self._tree.usage(number).get(name) if name in _USAGE else self._values(number).get(name)
        if value is None:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA), name)
        self._send_value(unique, value)

    def _list(self, unique: int, number: int, _size: int) -> None:
        self._send_value(unique, b"".join(os.fsencode(name) + b"\0" for name in self._values(number)))

    def _values(self, number: int) -> dict[str, bytes]:
        values = dict(self._tree.xattrs(number)) if number < control.DIRECTORY else {}
        if number == ROOT:
            values["user.shardfs.pid"] = b"%d" % os.getpid()
            values["user.shardfs.version"] = __version__.encode()
        return values

    def _send_value(self, unique: int, value: bytes) -> None:
        (room,) = protocol.GETXATTR_IN.unpack_from(self._request, protocol.BODY)
        if room == 0:
            self._device.send(protocol.xattr_size(unique, len(value)))
        elif room < len(value):
            raise OSError(errno.ERANGE, f"the extended attribute has {len(value)} bytes, the client's buffer {room}")
        else:
            self._device.send_data(unique, value)
