"""A FUSE session of libfuse 3, which mounts (through fusermount3 where necessary), negotiates, and unmounts."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import socket
import tempfile
from struct import Struct
from typing import TYPE_CHECKING, Any

from shardfs.fuse.protocol import BODY, HEADER_SIZE, MAX_TRANSFER, REQUEST_BUFFER
from shardfs.model.errors import MountError
from shardfs.storage.mount_calls import attach, clone, detach
from shardfs.storage.mount_table import mount_number, mounted_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from shardfs.storage import mount_table

# Capabilities that INIT requests or declines (FUSE_CAP_*; the numbers are part of libfuse's ABI)
_CAP_READDIRPLUS, _CAP_READDIRPLUS_AUTO = 1 << 13, 1 << 14
_CAP_SPLICE = 1 << 7 | 1 << 8 | 1 << 9

# Flags of INIT itself, at this offset of both its request and its reply.
_INIT_FLAGS, _INIT_AT = Struct("=I"), 12

_HANDLE_KILLPRIV_V2 = 1 << 28
"""Files of a mount cannot be set-user-id, so the kernel need not ask before each write which bits to remove. libfuse
supports this flag since 3.17."""

_PARALLEL_DIROPS = 1 << 18
"""The kernel sends a LOOKUP or READDIR of a directory while another one of that directory waits for its answer."""

_ADDED = _HANDLE_KILLPRIV_V2 | _PARALLEL_DIROPS


class Session:
    """One mount. Use it in this order: construct, `mount`, `negotiate`, serve `fd`, `unmount`, `close`.

    In the place of a dead mount: construct, `mount_detached`, `negotiate`, serve `fd`, `replace`, `unmount`, `close`.
    """

    def __init__(self, options: Sequence[str], max_background: int) -> None:
        """Make a session that is not mounted. Raise MountError if libfuse is missing or refuses the options.

        Args:
            options: mount options, `key` or `key=value`, as mount.fuse3(8) knows them.
            max_background: how many background requests, such as read-ahead, the kernel may send at the same time.
        """
        self._fuse = _libfuse()
        self._max_background = max_background
        self._negotiated = False
        argv = (ctypes.c_char_p * 3)(
            b"shardfs", b"-o", ",".join(map(_escaped, options)).encode("utf8", "surrogateescape")
        )
        self._arguments = (_Arguments(3, argv, 0), argv)
        # The table of operations is a list of pointers that begins with `init`; a shorter one is allowed.
        self._init = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(self._on_init)
        operations = ctypes.cast(self._init, ctypes.c_void_p)
        with _stderr() as lines:
            self._handle = self._fuse.new(self._arguments[0], ctypes.byref(operations), ctypes.sizeof(operations), None)
        if not self._handle:
            raise MountError(errno.EINVAL, "; ".join(lines) or "libfuse refused the mount options")
        self.fd = -1
        self._detached = -1  # descriptor of the mount that `replace` attaches
        self._is_by_hand = False  # else libfuse has mounted, and unmounts
        self._attached: list[tuple[str, int]] = []  # what `replace` leaves to `unmount`: mountpoint and number

    def mount(self, mountpoint: str) -> None:
        """Mount on a directory; requests can be read from `fd` afterwards, INIT first (`negotiate` does that).

        Raise MountError (EIO) with the reasons that libfuse and fusermount3 print.
        """
        with _stderr() as lines:
            failed = self._fuse.mount(self._handle, os.fsencode(mountpoint))
        if failed:
            why = "; ".join(lines) or "the kernel refused the mount"
            raise MountError(errno.EIO, f"cannot mount: {why}; `shardfs doctor` looks for the cause", mountpoint)
        # Our own descriptor: libfuse closes its one in `unmount`, while a thread may still be reading.
        self.fd = os.dup(self._fuse.fd(self._handle))

    def mount_detached(self) -> None:
        """Mount as `mount` does, but where no path leads, for `replace`. Raise MountError as `mount` does.

        Raise OSError before anything is mounted: EPERM if this user is not root, ENOSYS before Linux 5.2.
        """
        place = tempfile.mkdtemp(prefix="shardfs-")
        try:
            os.close(clone(place))  # raises while nothing is mounted yet
            self.mount(place)
            try:
                self._detached = clone(place)
                self._is_by_hand = True
            finally:
                detach(place, lazy=True)
        finally:
            os.rmdir(place)

    def replace(self, dead: mount_table.MountInfo) -> None:
        """Attach what `mount_detached` has made in the place of a dead mount, and detach that one.

        At each moment clients see one of the two mounts, never the directory below them. Raise MountError if it fails.
        """
        mountpoint = dead.mountpoint
        self._attached = [(mountpoint, mount_number(self._detached)), (mountpoint, dead.number)]
        try:
            attach(self._detached, mountpoint, beneath=True)
        except MountError as e:
            if e.errno != errno.EINVAL:
                raise
            # Before Linux 6.5. `unmount` detaches the dead mount as well.
            attach(self._detached, mountpoint, beneath=False)
        else:
            _detach_top(*self._attached.pop())
        os.close(self._detached)
        self._detached = -1

    def negotiate(self) -> None:
        """Wait for INIT, and answer it. The mount serves from then on. Raise OSError (ENODEV) if it ended before."""
        buffer = ctypes.create_string_buffer(REQUEST_BUFFER)
        while not self._negotiated:
            size = os.readv(self.fd, [buffer])
            request = self._fuse.Buffer(size=size, mem=ctypes.addressof(buffer))
            with self._intercepted() as reply:
                self._fuse.process(self._handle, ctypes.byref(request))
                answer = bytearray(reply())
            if self._negotiated:  # add the flags that the kernel offers and libfuse does not know
                (offered,) = _INIT_FLAGS.unpack_from(buffer, BODY + _INIT_AT)
                (accepted,) = _INIT_FLAGS.unpack_from(answer, HEADER_SIZE + _INIT_AT)
                _INIT_FLAGS.pack_into(answer, HEADER_SIZE + _INIT_AT, accepted | offered & _ADDED)
            os.write(self.fd, answer)

    @contextlib.contextmanager
    def _intercepted(self) -> Iterator[Callable[[], bytes]]:
        """Intercept libfuse's reply: gives a function that returns the reply, which is not sent to the kernel."""
        fd = self._fuse.fd(self._handle)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            os.dup2(theirs.fileno(), fd, inheritable=False)
            try:
                yield lambda: ours.recv(MAX_TRANSFER)
            finally:
                os.dup2(self.fd, fd, inheritable=False)

    def unmount(self) -> None:
        """Detach the mount, if it is still there; may be repeated. Programs with open files on it keep it alive.

        `fd` stays open, so that threads can serve these programs.
        """
        if not self._is_by_hand:
            self._fuse.unmount(self._handle)
        while self._attached:
            _detach_top(*self._attached.pop(0))

    def close(self) -> None:
        """Close `fd` and free the session. Call it once, after `unmount`, when no thread serves `fd` any more."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._fuse.destroy(self._handle)

    def _on_init(self, _userdata: int, connection: int) -> None:
        conn = ctypes.cast(connection, self._fuse.Connection).contents
        # Not READDIRPLUS_AUTO: find, du and cp list first and stat later, which makes the kernel guess wrong.
        conn.want = (conn.want | conn.capable & _CAP_READDIRPLUS) & ~(_CAP_READDIRPLUS_AUTO | _CAP_SPLICE)
        conn.max_write = MAX_TRANSFER
        conn.max_background = self._max_background
        self._negotiated = True


def _detach_top(mountpoint: str, number: int) -> None:
    """Detach the mount of this number, if it is still the topmost one: another one may be there by now."""
    top = mounted_at(mountpoint)
    if top is not None and top.number == number:
        detach(mountpoint, lazy=True)


class _Arguments(ctypes.Structure):
    _fields_ = (("argc", ctypes.c_int), ("argv", ctypes.POINTER(ctypes.c_char_p)), ("allocated", ctypes.c_int))


class _Library:
    """The functions of libfuse that are used, and the two structs that mfusepy defines for every version of it."""

    def __init__(self, mfusepy: ModuleType, library: ctypes.CDLL) -> None:
        pointer = ctypes.c_void_p
        integer = ctypes.c_int
        self.Buffer: Any = mfusepy.fuse_buf
        self.Connection: Any = ctypes.POINTER(mfusepy.fuse_conn_info)

        def function(name: str, return_type: Any, *arguments: Any) -> Any:
            symbol = getattr(library, f"fuse_session_{name}")
            symbol.restype = return_type
            symbol.argtypes = arguments
            return symbol

        self.new = function("new", pointer, ctypes.POINTER(_Arguments), pointer, ctypes.c_size_t, pointer)
        self.mount = function("mount", integer, pointer, ctypes.c_char_p)
        self.fd = function("fd", integer, pointer)
        self.process = function("process_buf", None, pointer, ctypes.POINTER(mfusepy.fuse_buf))
        self.unmount = function("unmount", None, pointer)
        self.destroy = function("destroy", None, pointer)


@functools.cache
def _libfuse() -> _Library:
    """Load libfuse 3. By default, mfusepy would load libfuse 2 if installed, and run compilers to find it."""
    for name in ("libfuse3.so.4", "libfuse3.so.3"):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(name)
            break
    else:
        raise MountError(errno.ENOENT, "libfuse 3 is not installed: apt install fuse3")
    before = os.environ.get("FUSE_LIBRARY_PATH")
    os.environ["FUSE_LIBRARY_PATH"] = name
    try:
        import mfusepy
    finally:
        if before is None:
            del os.environ["FUSE_LIBRARY_PATH"]
        else:
            os.environ["FUSE_LIBRARY_PATH"] = before
    return _Library(mfusepy, library)


def _escaped(option: str) -> str:
    return option.replace("\\", "\\\\").replace(",", "\\,")


@contextlib.contextmanager
def _stderr() -> Iterator[list[str]]:
    """Collect the lines of libfuse and fusermount3 on standard error, the only place where they give reasons."""
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines += filter(None, map(str.strip, file.read().decode("utf8", "replace").split("\n")))
