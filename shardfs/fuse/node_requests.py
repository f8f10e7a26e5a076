"""Requests about names and attributes: LOOKUP, GETATTR, FORGET, BATCH_FORGET, GETXATTR, LISTXATTR."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import numpy as np

from shardfs.fuse import control, protocol
from shardfs.fuse.device import Requests
from shardfs.fuse.invalidation import CAPACITY
from shardfs.model.errors import MayAppearError, ShardfsError
from shardfs.model.version import __version__
from shardfs.vfs.inodes import CREATED, ROOT, TABLE_END

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.fuse.device import Device, Handler
    from shardfs.fuse.invalidation import AttributeCache, ResizedFiles
    from shardfs.fuse.unreadable import UnreadableChunks
    from shardfs.model.attributes import Attributes
    from shardfs.model.file_tree import FileTree

_USAGE = ("user.shardfs.live", "user.shardfs.dead")
"""Attributes that read each index of an array. LISTXATTR omits them, so that `cp -a` does not ask for them."""

_CAPABILITIES = b"security.capability"


class NodeRequests(Requests):
    """Answers LOOKUP and GETATTR on a read-only mount, for one thread.

    `recent`, shared by all threads, keeps attributes between the LOOKUP or GETATTR of a file and its READs.
    """

    def __init__(
        self,
        tree: FileTree,
        recent: dict[int, Attributes],
        resized: ResizedFiles,
        unreadable: UnreadableChunks,
        device: Device,
        control_replies: control.ControlReplies,
    ) -> None:
        self._tree = tree
        self._recent = recent
        self._resized = resized
        self._unreadable = unreadable
        self._device = device
        self._control = control_replies

    def handlers(self) -> dict[int, Handler]:
        return {protocol.LOOKUP: self._lookup_handler(), protocol.GETATTR: self._getattr}

    def attributes_for_reads(self, number: int) -> Attributes:
        """The attributes of a file, which READs may use from now on. Raise the errors of `FileTree.attributes`."""
        if number >= control.DIRECTORY:
            return self._control.files.attributes(number)
        attributes = self._tree.attributes(number)
        if len(self._recent) >= CAPACITY:
            self._recent.clear()
        self._recent[number] = attributes
        return attributes

    def _lookup_handler(self) -> Handler:
        """A closure: attribute look-ups would cost as much as some of its work."""
        request = self._device.request
        send = self._device.send
        encoder = self._device.encoder
        recent = self._recent
        entry = encoder.entry_reply
        is_control_name = control.is_control_name
        lookup = self._tree.lookup
        remember = self._tree.remember
        forget = self._tree.forget
        begin, errors, absent = protocol.BODY, self._device.tally.errors, (protocol.LOOKUP, errno.ENOENT)
        around_control, resized = frozenset((ROOT, control.DIRECTORY)), self._resized.numbers
        unreadable = self._unreadable

        def answer(unique: int, parent: int, size: int) -> None:
            try:
                if parent in around_control and is_control_name(parent, request[begin : size - 1]):
                    self._control.send_entry(unique, parent, bytes(request[begin : size - 1]))
                    return
                attributes = lookup(parent, bytes(request[begin : size - 1]))
                if resized and attributes.number in resized:
                    resized.discard(attributes.number)
                    attributes = lookup(parent, bytes(request[begin : size - 1]))
            except FileNotFoundError:
                errors[absent] += 1
                send(encoder.absent_reply(unique))
                return
            except (OSError, ShardfsError) as e:
                number, reply = unreadable.entry_reply(unique, parent, bytes(request[begin : size - 1]), e)
                send_counted(number, reply)
                return
            number, directory, length, mtime_ns, _, mode = attributes
            if len(recent) >= CAPACITY:
                recent.clear()
            recent[number] = attributes
            reply = entry(unique, number, directory, length, mtime_ns)
            if mode:
                reply = encoder.entry_with_mode(reply, mode)
            send_counted(number, reply)

        def send_counted(number: int, reply: bytearray) -> None:
            if number >= TABLE_END:
                send(reply)
                return
            remember(number)
            if not send(reply):
                forget(number, 1)

        return answer

    def _getattr(self, unique: int, number: int, _size: int) -> None:
        if number >= control.DIRECTORY:
            self._control.send_attributes(unique, number)
            return
        self._resized.numbers.discard(number)  # before: another thread may find a newer version meanwhile
        try:
            _, directory, size, mtime_ns, _, mode = self.attributes_for_reads(number)
        except (OSError, ShardfsError) as e:
            self._device.send(self._unreadable.attributes_reply(unique, number, e))
            return
        encoder = self._device.encoder
        reply = encoder.attributes_reply(unique, number, directory, size, mtime_ns)
        self._device.send(encoder.attributes_with_mode(reply, mode) if mode else reply)


class WritableNodeRequests(Requests):
    """Answers LOOKUP and GETATTR on a writable mount, where files may have modes of their own. For one thread.

    Args:
        is_unlinked: returns whether a number is that of an open file without a name.
    """

    def __init__(
        self,
        tree: FileTree,
        is_unlinked: Callable[[int], bool],
        cache: AttributeCache,
        resized: ResizedFiles,
        unreadable: UnreadableChunks,
        device: Device,
        control_replies: control.ControlReplies,
    ) -> None:
        self._is_unlinked = is_unlinked
        self._resized = resized
        self._unreadable = unreadable
        self._tree = tree
        self._cache = cache
        self._control = control_replies
        self._device = device

    def handlers(self) -> dict[int, Handler]:
        return {protocol.LOOKUP: self._lookup, protocol.GETATTR: self._getattr}

    def attributes_for_reads(self, number: int) -> Attributes:
        """The attributes of a file, which READs may use until it changes. Raise the errors of `FileTree.attributes`."""
        if number >= control.DIRECTORY:
            return self._control.files.attributes(number)
        stamp = self._cache.stamp
        attributes = self._tree.attributes(number)
        self._cache.record(stamp, attributes)
        return attributes

    def send_attributes(self, unique: int, attributes: Attributes) -> None:
        """Reply to GETATTR and SETATTR. A file without a name has no links."""
        reply = self._device.encoder.attributes_reply(
            unique, attributes.number, attributes.directory, attributes.size, attributes.mtime_ns
        )
        if attributes.mode:
            reply = self._device.encoder.attributes_with_mode(reply, attributes.mode)
        if self._is_unlinked(attributes.number):
            reply = protocol.attributes_without_name(reply)
        self._device.send(reply)

    def send_entry(self, unique: int, attributes: Attributes) -> None:
        """Reply to LOOKUP and to requests that make a file or directory, and count the kernel's reference to it."""
        self._send_counted(attributes.number, self._entry(unique, attributes))

    def send_created(self, unique: int, attributes: Attributes, handle: int) -> bool:
        """Reply to CREATE, and count as `send_entry` does; False if the kernel does not wait for the reply any more."""
        reply = protocol.create_reply(self._entry(unique, attributes), protocol.OPEN_KEEP_CACHE, handle)
        return self._send_counted(attributes.number, reply)

    def _entry(self, unique: int, attributes: Attributes) -> bytearray:
        reply = self._device.encoder.entry_reply(
            unique, attributes.number, attributes.directory, attributes.size, attributes.mtime_ns
        )
        return self._device.encoder.entry_with_mode(reply, attributes.mode) if attributes.mode else reply

    def _send_counted(self, number: int, reply: bytes | bytearray) -> bool:
        """Send a reply after which the kernel refers to `number`, and count the reference."""
        if TABLE_END <= number < CREATED:
            return self._device.send(reply)
        self._tree.remember(number)
        if self._device.send(reply):
            return True
        self._tree.forget(number, 1)
        return False

    def _lookup(self, unique: int, parent: int, size: int) -> None:
        name = bytes(self._device.request[protocol.BODY : size - 1])
        try:
            if control.is_control_name(parent, name):
                self._control.send_entry(unique, parent, name)
                return
            if len(name) > protocol.NAME_MAX:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name[:32])
            stamp = self._cache.stamp
            attributes = self._tree.lookup(parent, name)
        except FileNotFoundError as failure:
            self._device.tally.errors[protocol.LOOKUP, errno.ENOENT] += 1
            may_appear = isinstance(failure, MayAppearError)
            self._device.send(
                protocol.error_reply(unique, errno.ENOENT) if may_appear else self._device.encoder.absent_reply(unique)
            )
            return
        except (OSError, ShardfsError) as e:
            self._send_counted(*self._unreadable.entry_reply(unique, parent, name, e))
            return
        self._resized.numbers.discard(attributes.number)
        self._cache.record(stamp, attributes)
        self.send_entry(unique, attributes)

    def _getattr(self, unique: int, number: int, _size: int) -> None:
        if number >= control.DIRECTORY:
            self._control.send_attributes(unique, number)
            return
        try:
            attributes = self.attributes_for_reads(number)
        except (OSError, ShardfsError) as e:
            self._device.send(self._unreadable.attributes_reply(unique, number, e))
            return
        self._resized.numbers.discard(number)
        self.send_attributes(unique, attributes)


def forget_handlers(tree: FileTree, files: control.Control, request: memoryview, *, end: int) -> dict[int, Handler]:
    """The handlers of FORGET and BATCH_FORGET, which have no reply. `request` is the buffer of the thread's requests.

    A BATCH_FORGET is passed to the tree for numbers below `end` only, and to `files` for theirs: on a read-only mount,
    nothing counts references to chunks, whose numbers are larger. A single FORGET is passed on for all numbers.
    """

    def forget(_unique: int, number: int, _size: int) -> None:
        if number >= control.DIRECTORY:
            files.forget(number)
        else:
            tree.forget(number, *protocol.FORGET_IN.unpack_from(request, protocol.BODY))

    def batch_forget(_unique: int, _number: int, _size: int) -> None:
        (count,) = protocol.BATCH_FORGET_IN.unpack_from(request, protocol.BODY)
        start = protocol.BODY + protocol.BATCH_FORGET_IN.size
        pairs = np.frombuffer(request, np.uint64, 2 * count, start).reshape(-1, 2)
        for number, times in pairs[pairs[:, 0] < np.uint64(end)].tolist():
            tree.forget(number, times)
        for number in pairs[pairs[:, 0] >= control.DIRECTORY, 0].tolist():
            files.forget(number)

    return {protocol.FORGET: forget, protocol.BATCH_FORGET: batch_forget}


class XattrRequests(Requests):
    """Answers GETXATTR and LISTXATTR, for one thread."""

    def __init__(self, tree: FileTree, device: Device) -> None:
        self._tree = tree
        self._device = device
        self._request = device.request

    def handlers(self) -> dict[int, Handler]:
        return {protocol.GETXATTR: self._get, protocol.LISTXATTR: self._list}

    def _get(self, unique: int, number: int, size: int) -> None:
        start = protocol.BODY + protocol.GETXATTR_IN.size
        if self._request[start : size - 1] == _CAPABILITIES:  # the kernel asks before the first write to a file
            self._device.tally.errors[protocol.GETXATTR, errno.EOPNOTSUPP] += 1
            self._device.send(protocol.error_reply(unique, errno.EOPNOTSUPP))
            return
        name = os.fsdecode(bytes(self._request[start : size - 1]))
        if not name.startswith("user."):
            # ENODATA would be true as well, but after EOPNOTSUPP `ls -l` stops asking every file for its ACL.
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), name)
        value = self._tree.costly_xattrs(number).get(name) if name in _USAGE else self._values(number).get(name)
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
            self._device.send(protocol.xattr_size_reply(unique, len(value)))
        elif room < len(value):
            raise OSError(errno.ERANGE, f"the extended attribute has {len(value)} bytes, the client's buffer {room}")
        else:
            self._device.send_data(unique, value)
