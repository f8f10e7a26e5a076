"""Errors of a store as errors that name the source or target."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardfs.model.errors import BusyError, UnsupportedError, errno_of, is_bug, is_expected
from shardfs.model.redact import public_name

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def opening(source: str) -> Iterator[None]:
    """Convert the errors of a block to errors that name the source or target, without secrets.

    OSError keeps its errno; UnsupportedError gets the name as `source`; a missing package and all other errors of
    client libraries become OSError (EIO). Errors that have a name, other errors of shardfs, and bugs pass unchanged.
    """
    try:
        yield
    except OSError as e:
        if e.filename or isinstance(e, BusyError):
            raise
        number = errno_of(e)  # a FileNotFoundError of fsspec has neither errno nor message
        words = e.strerror or (os.strerror(number) if isinstance(e, FileNotFoundError) else str(e))
        raise OSError(number, words, public_name(source)) from e
    except UnsupportedError as e:
        if e.source:
            raise
        error = type(e)(f"{public_name(source)}: {e}")
        error.source = public_name(source)
        raise error from e
    except Exception as e:
        if isinstance(e, ImportError):
            why = _missing_package(source, e)
        elif isinstance(e, ValueError):  # fsspec does not know the protocol
            why = f"cannot be opened: {e}"
        elif is_expected(e) or is_bug(e):
            raise
        else:
            why = f"cannot be opened: {type(e).__name__}: {e}"
        raise OSError(errno.EIO, why, public_name(source)) from e


def _missing_package(source: str, error: ImportError) -> str:
    from shardfs.storage.store import install_command, package_for  # imports numpy

    package = package_for(source)
    if not package:
        return f"cannot be opened: {error}"
    return f"needs the package {package} ({error}): {install_command(source)}"
