"""Checks for problems that prevent mounts from working on this machine, each with a remedy."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import resource
import shutil
import stat
import time
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from shardfs.daemon.asking import mounts
from shardfs.daemon.health import NOTE, OK, WRONG, Diagnosis, examine_mount
from shardfs.daemon.logs import require_appendable
from shardfs.daemon.opening import check, open_for_mount, require_writable
from shardfs.daemon.status_server import StatusServer
from shardfs.daemon.tuning import DESCRIPTORS
from shardfs.formats.registry import formats
from shardfs.model.blobs import ByteRange, Suffix
from shardfs.model.errors import MountError, NotADatasetError, OptionError, ShardfsError, UnsupportedError, message
from shardfs.model.redact import public_name, redacted
from shardfs.storage.open_store import open_store
from shardfs.storage.retry import RetryPolicy, StoreTimeout, http_status
from shardfs.storage.store import install_command, package_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardfs.config.options import Options
    from shardfs.storage.store import Store

DEVICE, FUSE_CONF, FUSE_SYSCTL = "/dev/fuse", "/etc/fuse.conf", "/proc/sys/fs/fuse"
MEMINFO, CGROUP = "/proc/meminfo", "/sys/fs/cgroup"

MOST_BYTES = 1 << 20
"""At most this many bytes of a document, and one more, are read for the checks."""

SECONDS = 10.0
"""Upper limit for `store_timeout` during the checks, in seconds."""


def examine_machine(options: Options) -> Iterator[Diagnosis]:
    """Yield the diagnoses of this machine and of all of its mounts. `options` are those of the mount to be made."""
    yield _device()
    yield _fusermount()
    yield _libfuse()
    yield _packages()
    yield _fuse_conf(options)
    yield _kernel_timeout(options)
    yield _descriptors()
    yield _memory(options)
    yield from _mounts()


# ---- machine


def _device() -> Diagnosis:
    try:
        os.close(os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        fix = "modprobe fuse; in a container, start it with --device /dev/fuse --cap-add SYS_ADMIN"
        return Diagnosis("device", WRONG, f"{DEVICE} does not exist", fix)
    except OSError as e:
        fix = "in a container, start it with --device /dev/fuse" if e.errno == errno.EPERM else f"chmod 666 {DEVICE}"
        return Diagnosis("device", WRONG, f"{DEVICE} cannot be opened: {e.strerror}", fix)
    return Diagnosis("device", OK, f"{DEVICE} can be opened")


def _fusermount() -> Diagnosis:
    path = shutil.which("fusermount3")
    if path is None:
        state = NOTE if os.geteuid() == 0 else WRONG
        return Diagnosis("fusermount3", state, "is not installed, and only root can mount", "apt install fuse3")
    info = os.stat(path)
    if os.geteuid() != 0 and not (info.st_mode & stat.S_ISUID and info.st_uid == 0):
        fix = f"chown root {path} && chmod u+s {path}"
        return Diagnosis("fusermount3", WRONG, f"{path} does not run as root, so it cannot mount", fix)
    return Diagnosis("fusermount3", OK, path)


def _libfuse() -> Diagnosis:
    for name in ("libfuse3.so.4", "libfuse3.so.3"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.fuse_pkgversion.restype = ctypes.c_char_p
        return Diagnosis("libfuse", OK, library.fuse_pkgversion().decode())
    return Diagnosis("libfuse", WRONG, "libfuse 3 is not installed", "apt install fuse3")


def _packages() -> Diagnosis:
    """The versions of the packages that read stores and chunks, for reports of problems."""
    versions = []
    for name in ("numpy", "numcodecs", "mfusepy", "fsspec", "aiohttp", "s3fs", "gcsfs", "adlfs", "obstore"):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return Diagnosis("packages", OK, ", ".join(versions))


def _fuse_conf(options: Options) -> Diagnosis:
    try:
        lines = Path(FUSE_CONF).read_text().splitlines()
    except OSError:
        lines = []
    if os.geteuid() == 0 or any(line.split("#")[0].strip() == "user_allow_other" for line in lines):
        return Diagnosis("user_allow_other", OK, "other users may be let in with allow_other")
    state = WRONG if options.allow_other else NOTE
    fix = f"as root: echo user_allow_other >> {FUSE_CONF}"
    return Diagnosis("user_allow_other", state, f"is not in {FUSE_CONF}: allow_other is refused to you", fix)


def _kernel_timeout(options: Options) -> Diagnosis:
    limits = [s for name in ("max_request_timeout", "default_request_timeout") if (s := _sysctl(name))]
    if not limits:
        return Diagnosis("request time-out", OK, "the kernel waits for as long as it takes")
    seconds, needed = min(limits), 2 * options.store_timeout
    if seconds > needed:
        return Diagnosis("request time-out", OK, f"the kernel waits {seconds} s for an answer")
    limit = int(2 * needed)
    sysctls = f"fs.fuse.max_request_timeout={limit} fs.fuse.default_request_timeout={limit}"
    finding = f"the kernel ends a mount that does not answer within {seconds} s, and a store may take {needed:g} s"
    return Diagnosis("request time-out", WRONG, finding, f"store_timeout={seconds / 4:g}, or sysctl {sysctls}")


def _sysctl(name: str) -> int:
    try:
        return int(Path(FUSE_SYSCTL, name).read_text())
    except (OSError, ValueError):  # an older kernel does not have this setting
        return 0


def _descriptors() -> Diagnosis:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS:
        finding = f"no more than {hard} files may be open, and a mount may need {DESCRIPTORS}"
        fix = f"ulimit -Hn {DESCRIPTORS}, or LimitNOFILE={DESCRIPTORS} in the unit"
        return Diagnosis("descriptors", WRONG, finding, fix)
    return Diagnosis("descriptors", OK, f"{hard} files may be open" if hard >= 0 else "any number of files may be open")


def _memory(options: Options) -> Diagnosis:
    wanted = options.index_cache + options.chunk_cache
    free = _available_bytes()
    finding = f"caches may take {wanted >> 20} MiB; {free >> 20} MiB are available"
    if free and wanted > free:
        return Diagnosis("memory", WRONG, finding, f"index_cache={free >> 22}M,chunk_cache={free >> 22}M")
    return Diagnosis("memory", OK, finding)


def _available_bytes() -> int:
    limits = []
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", Path(MEMINFO).read_text(), re.MULTILINE)
        limits += [int(match[1]) << 10] if match else []
        limit = Path(CGROUP, "memory.max").read_text().strip()
        limits += [int(limit)] if limit.isdecimal() else []
    except OSError:  # this system has no such limit
        pass
    return min(limits, default=0)


def _mounts() -> Iterator[Diagnosis]:
    for mount in mounts():
        yield from examine_mount(mount)


# ---- source


def examine_source(source: str, options: Options, *, is_mounted: bool = False) -> Iterator[Diagnosis]:
    """Check whether a source, an absolute path or URL, can be mounted. The first error of the store ends the checks.

    Changes nothing, apart from probes on object stores if the options say `rw`.

    `is_mounted`: a mount with these options exists. What its daemon alone can have, the address for metrics and the
    lock of a writable mount, is not checked.
    """
    name = public_name(source)
    try:
        check(options)
    except OptionError as e:
        yield Diagnosis("options", WRONG, str(e), "`shardfs help mount` describes the options")
        return
    yield from _outputs(options, is_mounted=is_mounted)
    seconds, retries = min(options.store_timeout, SECONDS), min(options.store_retries, 1)
    options = replace(options, store_timeout=seconds, store_retries=retries)
    start = time.monotonic()
    try:
        store = _store(source, options)
        documents = _documents(store)
    except Exception as e:  # noqa: BLE001 - the diagnosis contains the error
        yield _unreachable(source, name, e)
        return
    milliseconds = (time.monotonic() - start) * 1000
    yield Diagnosis("store", OK, f"{name}: answers within {milliseconds:.0f} ms")
    if store.remote:
        yield from _ranges(store, documents)
    yield from _dataset(source, name, options, is_mounted=is_mounted)


def _store(source: str, options: Options) -> Store:
    return open_store(
        source,
        options.storage_options,
        follow_symlinks=options.symlinks == "follow",
        retry=RetryPolicy(options.store_timeout, options.store_retries),
        cache_dir=options.cache_dir,
        cache_size=options.cache_size,
        offline=options.offline,
    )


def _documents(store: Store) -> dict[str, bytes]:
    names = dict.fromkeys(name for f in formats() for name in f.documents)
    return store.documents("", list(names), MOST_BYTES)


def _unreachable(source: str, name: str, e: Exception) -> Diagnosis:
    package, check = package_for(source), "store"
    if isinstance(e, ImportError):
        fix = install_command(source) or "install the package that the message names"
    elif isinstance(e, PermissionError) or _is_about_credentials(e):
        check, fix = "credentials", _CREDENTIALS.get(package or "", _RIGHTS)
    elif isinstance(e, StoreTimeout | TimeoutError):
        fix = "check the network, the proxy, the host name in the URL and endpoint_url"
    elif isinstance(e, FileNotFoundError):
        fix = "check the spelling of the path, and whether its disk is mounted"
    else:
        fix = "check the URL and the storage options"
    return Diagnosis(check, WRONG, f"{name}: {message(e)}", fix)


_CREDENTIALS = {
    "s3fs": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket, "
    "storage_option.anon=true",
    "gcsfs": "gcloud auth application-default login; for a public bucket, storage_option.token=anon",
    "adlfs": "set AZURE_STORAGE_ACCOUNT_NAME and a key or SAS token; for a public container, storage_option.anon=true",
    "aiohttp": "the server refuses access: put https://NAME:PASSWORD@... into a profile",
}
_RIGHTS = "let the user that mounts read it; shardfs reads with the rights of that user"


def _is_about_credentials(e: BaseException | None) -> bool:
    while e is not None:
        if http_status(e) in (401, 403) or "Credential" in type(e).__name__ or "Unable to locate credentials" in str(e):
            return True
        e = e.__cause__
    return False


def _ranges(store: Store, documents: Mapping[str, bytes]) -> Iterator[Diagnosis]:
    """Check whether the store honours byte ranges, counted from the start and from the end of an object."""
    name = next((name for name, data in documents.items() if 8 < len(data) <= MOST_BYTES), None)  # a longer one is cut
    if name is None:
        yield Diagnosis("byte ranges", NOTE, "there is no document in the source to try them with")
        return
    data = documents[name]
    try:
        store.require_ranges([name])
        parts = [store.open(name).read([part])[0] for part in (ByteRange(2, 6), Suffix(4))]
    except OSError as e:
        fix = "serve the source with a server that honours Range, such as nginx; or copy it, and mount the copy"
        yield Diagnosis("byte ranges", WRONG, redacted(f"{name}: {e.strerror or e}"), fix)
        return
    if parts == [data[2:6], data[-4:]]:
        yield Diagnosis("byte ranges", OK, "are honoured")
    else:
        fix = "a cache or proxy between here and the store answers wrongly: bypass it"
        yield Diagnosis("byte ranges", WRONG, f"{name}: the store returned other bytes than the range requested", fix)


def _outputs(options: Options, *, is_mounted: bool) -> Iterator[Diagnosis]:
    """Report files and addresses of the options that the daemon could not open."""
    for name in ("log_file", "access_log"):
        path = getattr(options, name)
        try:
            if path is not None:
                require_appendable(path)
        except OSError as e:
            yield Diagnosis("options", WRONG, f"{name}: {message(e)}", f"give a file in a directory of yours as {name}")
    try:
        if options.metrics_addr is not None and not is_mounted:
            StatusServer(options.metrics_addr).close()
    except MountError as e:
        yield Diagnosis("options", WRONG, f"metrics_addr: {message(e)}", "give another port, or 0 for any free port")


def _dataset(source: str, name: str, options: Options, *, is_mounted: bool) -> Iterator[Diagnosis]:
    """Open the source as a mount does, and report whether it can be mounted, also for writing if the options say so."""
    try:
        tree = open_for_mount(source, options)
    except UnsupportedError as e:
        missing = isinstance(e, NotADatasetError)
        fix = "give the directory of an array or group" if missing else "`shardfs info` lists what is in it"
        yield Diagnosis("dataset", WRONG, message(e), fix)
        return
    except (ShardfsError, OSError) as e:
        yield Diagnosis("dataset", WRONG, f"{name}: {message(e)}", "repair or copy this part of the source")
        return
    if problems := tree.problems():
        reasons = "; ".join(f"{p.path or '/'}: {p.why}" for p in problems[:3])
        yield Diagnosis("dataset", NOTE, f"{name}: some of it is shown as it is stored: {reasons}")
    else:
        yield Diagnosis("dataset", OK, f"{name}: can be mounted")
    if not options.rw or is_mounted:
        return
    try:
        require_writable(tree, source, options)
    except (ShardfsError, OSError) as e:
        yield Diagnosis("writing", WRONG, f"{name}: {message(e)}", "mount it without `writable`")
    else:
        yield Diagnosis("writing", OK, f"{name}: can be mounted with `writable`")
