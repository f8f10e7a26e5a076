"""Chunks that a program compresses itself: a file `X.gz` is the chunk `X` from its close on."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import numpy as np

from shardfs.model.kinds import NameKind, compression
from shardfs.write.encoding import stored_bytes, uncompressed
from shardfs.write.files import split

if TYPE_CHECKING:
    from shardfs.write.files import WritableFile
    from shardfs.write.names import Names
    from shardfs.write.open_files import Backing, OpenFiles
    from shardfs.write.overlay import Overlay


class CompressedChunks:
    """Turns files with the names of compressed chunks into chunks. Thread-safe."""

    def __init__(self, overlay: Overlay, open_files: OpenFiles, names: Names, backing: Backing) -> None:
        self._overlay, self._open_files, self._names, self._pending = overlay, open_files, names, backing.pending

    def write(self, file: WritableFile, path: str, data: bytes) -> None:
        """Write the bytes `data` of a file at `path`, decompressed, as a new version of the chunk.

        The compressed file keeps its name: the caller removes it.

        Raise OSError (EINVAL) if they are no such chunk, or as `OpenFiles.classify_to_write`.
        """
        plain = path.removesuffix(compression(path))
        directory, name = split(plain)
        content = uncompressed(path, data)
        self._pending.make_room(len(content))
        with self._names.gate.shared():
            target = self._open_files.classify_to_write(directory, name).target
            if target is None:
                raise OSError(errno.EINVAL, "no metadata describes this chunk any more", plain)
            stored = stored_bytes(target, content)
            present = self._overlay.find(directory, name)
            if present is not None:
                self._open_files.adopt(present.number)
            self._pending.look(plain, target)
            with self._names.lock:
                files = self._names.files
                chunk = files.at(plain) or files.new(directory, name, NameKind.CHUNK, target)
                version = self._pending.move(
                    path, plain, target, None, content if stored is None else stored, file.mtime_ns, file.mode,
                    stored=stored is not None,
                )  # fmt: skip
                chunk.commit(version, dirty=True)
                chunk.set_status(size=-1, mtime_ns=file.mtime_ns, mode=file.mode)
                if not chunk.writers:
                    chunk.drop_buffer()
                file.publish(None)
        if present is None:
            self._names.invalidate(directory, name)
        self._names.hooks.reshaped(np.array([chunk.number], np.uint64))
