"""Mounts a source: checks the mountpoint, and serves in this process or in a daemon."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardfs.daemon import background, mountpoint, serving
from shardfs.daemon.opening import check
from shardfs.model.exit_codes import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.config.options import Options


def checked(source: str, place: str, options: Options) -> serving.MountArguments:
    """The arguments of a mount of `source`, an absolute path or URL, on the directory `place`.

    Raise OptionError if options contradict each other, and MountError if `place` cannot be the mountpoint. Logs
    warnings, and detaches dead mounts, as `mountpoint.check` does.
    """
    check(options)
    # Resolve links: libfuse interprets /dev/fd/N as an open FUSE device.
    place = os.path.realpath(place)
    dead = mountpoint.check(place, options.nonempty)
    mountpoint.check_apart(source, place)
    return serving.MountArguments(source=source, mountpoint=place, options=options, dead=dead)


def mount(
    source: str, place: str, options: Options, *, foreground: bool, ready: Callable[[], object] = lambda: None
) -> int:
    """Mount a source on the directory `place`; return the exit code. Raise the errors of `checked`.

    In the foreground, returns after the unmount, with exit code 3 if written data stays in the journal, and raises the
    errors of `serving.serve`. Otherwise returns when the mount answers, and a daemon serves the mount; its errors are
    printed, and become exit codes.

    `ready` is called in this process when the mount answers.
    """
    arguments = checked(source, place, options)
    if foreground:
        return serving.serve_in_foreground(arguments, ready)
    code = background.mount_in_background(arguments)
    if code == ExitCode.OK:
        ready()
    return code
