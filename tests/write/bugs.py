"""T28, the tests are tested: bugs that one could have made, put in one by one, for the quick tests to find.

`python -m tests.write.bugs [NAME...]` applies each to a copy of the sources and runs tests there: first those that are
meant to find it, then all quick tests of writing. It prints which bugs were found, and by which test, and ends with
status 1 if one was not.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from tests.datasets import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

CRASHES = "tests/write/test_crashes.py"
KILLS = f"{CRASHES}::test_a_kill_at_some_calls"
POWER = f"{CRASHES}::test_power_losses"
SYNCS = f"{CRASHES}::test_an_fsync_that_fails_and_is_believed_later"
ERRORS = f"{CRASHES}::test_errors_of_some_calls"
LYING = f"{CRASHES}::test_shards_that_are_changed_where_they_lie"
CALLS = "tests/write/test_threads.py::test_calls_on_a_chunk_leave_what_one_after_the_other_leaves"
PUBLISHES = "tests/write/test_threads.py::test_calls_during_a_publish_leave_what_one_after_the_other_leaves"
REMOTE = "tests/write/test_threads.py::test_calls_during_a_remote_publish_leave_what_one_after_the_other_leaves"
STORES = "tests/write/test_threads.py::test_calls_on_a_remote_file_leave_what_one_after_the_other_leaves"
WAKES = "tests/write/test_threads.py::test_who_waits_for_a_publish_is_woken"
LEADERS = "tests/fuse/test_leadership.py"
NODES = "tests/vfs/test_nodes.py"
SEEN = "tests/write/test_seen_documents.py"
AHEAD = "tests/storage/test_read_ahead.py"
MODEL = "tests/write/test_model.py"
MANY = "tests/write/test_many_writers.py"
PROMISES = "tests/promises"


@dataclass(frozen=True)
class Bug:
    """A bug to seed.

    Args:
        edits: (function, old text, new text): in the function of this qualified name, the text is replaced.
        found_by: the tests that should find the bug, and run first.
    """

    name: str
    edits: tuple[tuple[str, str, str], ...]
    found_by: tuple[str, ...]


def bug(name: str, function: str, old: str, new: str, *found_by: str) -> Bug:
    return Bug(name, ((function, old, new),), found_by)


BUGS = [
    # ---- the order of things on the disk
    bug(
        "the new shard is not synced",
        "written",
        "        syscalls.fsync(fd)\n    except BaseException:",
        "    except BaseException:",
        POWER,
    ),
    bug(
        "the name of a new shard is not synced",
        "switch",
        "    syscalls.fsync_directory(place.at)\n    return True\n",
        "    return True\n",
        "tests/write/test_local_writer.py::test_the_name_of_a_new_object_is_on_disk_after_an_update",
    ),
    bug(
        "the old shard is removed before the exchange is on disk",
        "finish_or_undo",
        "        syscalls.fsync_directory(place.at)  # first",
        "        # first",
        POWER,
    ),
    Bug(
        "the new shard is synced after the exchange",
        (
            ("written", "        syscalls.fsync(fd)\n    except BaseException:", "    except BaseException:"),
            (
                "LocalWriter._attempt",
                "            return stat_of(new)\n",
                "            syscalls.fsync(fd)\n            return stat_of(new)\n",
            ),
        ),
        (POWER,),
    ),
    bug(
        "what is appended to a shard is not synced before entries lead there",
        "_append",
        "    verify(new)\n    syscalls.fsync(fd)\n",
        "    verify(new)\n",
        LYING,
    ),
    bug(
        "entries that were changed where they lie are not synced",
        "changed",
        "        syscalls.fsync(fd)\n        info = os.fstat(fd)\n        return",
        "        info = os.fstat(fd)\n        return",
        LYING,
    ),
    bug(
        "entries of which the sync failed are not written again",
        "made_last",
        "            syscalls.pwrite_all(fd, os.pread(fd, note.head, 0), 0)\n",
        "",
        LYING,
    ),
    bug(
        "the journal says that it is published before it is",
        "Backlog.begin",
        "        self.journal.sync()\n",
        "        self.done(note.key, lsns, dict.fromkeys(entries, SAME))\n        self.journal.sync()\n",
        KILLS,
    ),
    bug(
        "the journal is not synced",
        "Appender._sync_segments",
        "                syscalls.fdatasync(segment.fd)\n            except OSError as e:",
        "                pass\n            except OSError as e:",
        POWER,
    ),
    bug(
        "fsync does not wait for the journal",
        "FileCalls.fsync",
        "            self._commit(file, handle, file.saved_path)\n            self._pending.sync()\n",
        "            self._commit(file, handle, file.saved_path)\n",
        POWER,
    ),
    bug(
        "a failed fdatasync of the journal is tried again and believed",
        "Appender._sync_segments",
        "                broken.append(segment)\n",
        "                syscalls.fdatasync(segment.fd)\n",
        SYNCS,
    ),
    bug(
        "the name of a new segment is not synced",
        "Segment._with_header",
        "        syscalls.fsync_directory(os.path.dirname(path))\n",
        "",
        POWER,
    ),
    # ---- recovery
    bug(
        "what had begun is not cleared up",
        "Backlog.finish_begun",
        "            writer.recover(Begun.from_json(meta))\n",
        "            pass\n",
        "tests/write/test_conflicts.py",
    ),
    bug(
        "the journal's tail is cut at the first bad record",
        "_Scan.run",
        "            elif (after := self._next(at + records.ALIGN)) is not None and after < stop:",
        "            elif True:\n                break\n"
        "            elif (after := self._next(at + records.ALIGN)) is not None and after < stop:",
        "tests/write/test_journal_damage.py",
    ),
    bug(
        "checksums of the journal are not looked at",
        "_Scan._whole",
        "        if crc != head.data_crc:\n            return False\n",
        "",
        "tests/write/test_journal_damage.py",
        POWER,
    ),
    bug(
        "deleted chunks are shown again after a crash",
        "Overlay.recover",
        "                    self._files.hide(parent, name)\n",
        "                    pass\n",
        KILLS,
        MODEL,
    ),
    bug(
        "the oldest version wins",
        "Pending._set",
        "        old = self.versions.pop(path, None)\n",
        "        old = self.versions.pop(path, None)\n        version = old or version\n",
        KILLS,
    ),
    # ---- other writers
    bug(
        "nobody looks whether somebody else changed the chunk",
        "conflicts",
        "        if key in unchanged or base.digests is None or now.get(key) in base.digests:\n",
        "        if True:\n",
        PROMISES,
    ),
    bug(
        "a chunk whose earlier bytes are not known counts as unchanged",
        "conflicts",
        "        if key in unchanged or base.digests is None or",
        "        if key in unchanged or not base.digests or",
        PROMISES,
    ),
    bug(
        "a publish that a crash interrupted is taken for another writer",
        "Pending._begin",
        "                self._set_base(path, version, version.base.including(digest), record)\n",
        "                pass\n",
        PROMISES,
    ),
    bug(
        "other bytes than those that were written are published",
        "Job.verify",
        " != self._wanted[target.coords]\n",
        " != self.digests[path]\n",
        "tests/write/test_told_errors.py::test_chunks_that_a_wrong_plan_exchanges_are_not_published",
    ),
    bug(
        "what comes out of the exchange is taken for ours",
        "finish_or_undo",
        "    if temp == note.base:\n",
        "    if True:\n",
        "tests/write/test_local_writer.py",
    ),
    bug(
        "shards are not locked",
        "_attempt",
        "        fd = _open_own(name, at)\n",
        "        return os.open(name, os.O_WRONLY, dir_fd=at)\n",
        "tests/write/test_local_writer.py",
        "tests/write/test_native_writers.py",
    ),
    bug(
        "the journal is not locked",
        "Lock.take",
        "            syscalls.lock(fd",
        "            (lambda *_, **__: None)(fd",
        "tests/write/test_journal_places.py",
    ),
    bug(
        "every publish packs the shard",
        "Job._packs",
        '        if old.blob is None or compact == "never"',
        '        return old.blob is not None\n        if old.blob is None or compact == "never"',
        f"{MANY}::test_native_readers_see_whole_versions_during_publishes",
    ),
    bug(
        "a shard is replaced without a look at the chunks that it has",
        "Job._is_replaced",
        "    return old.replaces_all(",
        "    return True or old.replaces_all(",
        "tests/write/test_remote_requests.py::test_chunks_outside_of_the_array_stay",
    ),
    bug(
        "a chunk that was written again while it was published is forgotten",
        "DirtyShards.published",
        "                if self._backlog.versions.get(path) is None:\n",
        "                if True:\n",
        MANY,
    ),
    # ---- files
    bug(
        "files are put into the journal when they are released, not when they are closed",
        "FileCalls.flush",
        "        self._commit(file, handle, path)\n",
        "        self._raise_errors(handle, path)\n",
        f"{CRASHES}::test_a_kill_between_a_close_and_the_release_that_follows_it",
    ),
    bug(
        "what is stored through a mapping after the close is lost",
        "FileCalls.release",
        "            while opened.writes and not file.stop_writing():\n",
        "            while opened.writes and not file.stop_writing() and not file.dirty:\n",
        "tests/write/test_posix_rw.py",
    ),
    bug(
        "an error is told to nobody if it came before the file was opened",
        "Failures.seen",
        "newest[0] - (newest[2] in self._unseen)",
        "newest[0]",
        "tests/write/test_told_errors.py",
    ),
    bug(
        "numbers of files are made of their paths",
        "Files.new",
        "        file = self.unnamed(kind, target, number)\n",
        "        file = self.unnamed(kind, target, number or CREATED + sum(parent.encode() + name))\n",
        f"{MANY}::test_compare_and_swap_counts_exactly",
        "tests/write/test_semantics_rw.py",
    ),
    bug(
        "the old name of a chunk comes back after it was renamed",
        "WriteBuffer.rename",
        '"gone": removed is not None',
        '"gone": False',
        MODEL,
        KILLS,
    ),
    bug(
        "empty chunks are published",
        "DirtyShards._to_publish",
        "            empty = version.data is not None and version.data.size == 0 and not target.tree.by_id\n",
        "            empty = False\n",
        MODEL,
    ),
    bug(
        "a short write is taken for a whole one",
        "pwrite_all",
        "        view, offset = view[n:], offset + n\n",
        "        view, offset = view[len(view) :], offset + n\n",
        "tests/write/test_disk.py",
        ERRORS,
    ),
    bug(
        "O_EXCL is not looked at",
        "FileCalls.create",
        "            if flags & os.O_EXCL:\n                raise FileExistsError(errno.EEXIST, ",
        "            if False:\n                raise FileExistsError(errno.EEXIST, ",
        "tests/write/test_fsspec_writing.py",  # on a mount the kernel has looked before
    ),
    # ---- threads: races that were in the code once, or that a lock prevents
    bug(
        "two threads that close a file at once both leave it to the other to save it",
        "WritableFile.stop_writing",
        "        with self._lock:\n            if self.writers == 1 and",
        "        is_last = self.writers == 1\n        with self._lock:\n            if is_last and",
        CALLS,
    ),
    bug(
        "a file that is truncated by name is saved by nobody",
        "FileCalls.truncate",
        "        file, opened = self._open_files.add_known(number, os.O_WRONLY)\n        try:\n"
        "            if file.writers == 1:\n                self._names.before_waiting()\n"
        "            self._resize(file, size)\n"
        "            if file.writers == 1:  # else the close of another writer saves it\n"
        "                self._kinds.commit(file)\n        finally:\n            self.release(opened)\n",
        "        file = self._open_files.adopt(number)\n        self._resize(file, size)\n"
        "        if not file.writers:\n            try:\n                self._kinds.commit(file)\n"
        "            finally:\n                self._kinds.drop_buffer(file)\n",
        CALLS,
    ),
    bug(
        "a chunk that is removed while its shard is published comes back",
        "WriteBuffer.remove",
        "        self.is_stored(predecessor.path, predecessor.target)  # loads the index before the lock is taken\n"
        "        base = self._hold(predecessor)\n        try:\n"
        "            if self.is_stored(predecessor.path, predecessor.target):\n",
        "        was_stored = self.is_stored(predecessor.path, predecessor.target)\n"
        "        base = self._hold(predecessor)\n        try:\n            if was_stored:\n",
        PUBLISHES,
    ),
    bug(
        "a chunk that a publish has taken counts as absent",
        "WriteBuffer.is_stored",
        "        if shard is not None and path in shard.publishing:\n",
        "        if False:\n",
        PUBLISHES,
    ),
    bug(
        "a published version takes a newer one with it",
        "Pending._done",
        "            if version is not None and version.lsn > last:",
        "            if False:",
        PUBLISHES,
    ),
    bug(
        "a file shows the shard although a newer version of it is pending",
        "Kinds.published",
        "                if file.version is not None and file.version.lsn == version.lsn:\n",
        "                if True:\n",
        PUBLISHES,
    ),
    bug(
        "a chunk that was written over before its shard was replaced is in conflict",
        "WriteBuffer._is_present",
        "        return not self.backlog.has_replaced(",
        "        return True or self.backlog.has_replaced(",
        REMOTE,
    ),
    bug(
        "a chunk of a remote shard that waits while the shard is replaced is in conflict",
        "Backlog.done",
        "            relying = [path for path in waiting if self.versions[path].base.relies_on(before)]\n",
        "            relying = list[str]()\n",
        REMOTE,
    ),
    bug(
        "two closes write a file to the store at the same time",
        "FileKind.commit",
        "        with file.writeback:  # before the gate, which a document takes alone\n",
        "        if True:\n",
        STORES,
    ),
    Bug(
        "a close succeeds while another one may fail to save the file",
        (
            (
                "WritableFile.start_writeback",
                "            buffer, path = unsaved\n",
                "            buffer, path = unsaved\n            self.dirty = False\n",
            ),
            (
                "FileKind.commit",
                "        with file.writeback:  # before the gate, which a document takes alone\n"
                "            if (unsaved := file.start_writeback(self.kind)) is None:\n                return\n"
                "            self.save(file, unsaved)\n            file.end_writeback(unsaved)\n",
                "        if (unsaved := file.start_writeback(self.kind)) is None:\n            return\n"
                "        try:\n            self.save(file, unsaved)\n        except OSError:\n"
                "            file.dirty = True\n            raise\n",
            ),
        ),
        (STORES,),
    ),
    bug(
        "a file that is renamed or removed while it is closed comes back",
        "Names.writeback",
        "                self._acquire(file.writeback)\n                stack.callback(file.writeback.release)\n",
        "                pass\n",
        STORES,
    ),
    bug(
        "the end of a publish wakes nobody",
        "DirtyShards.release",
        "            self._changed.notify_all()\n",
        "",
        WAKES,
    ),
    Bug(
        "publishers are not woken by a flush",
        (
            ("DirtyShards.ask", "            self._changed.notify_all()\n", ""),
            ("Publisher.drain", "                self._changed.notify_all()\n", ""),
        ),
        (WAKES,),
    ),
    bug(
        "a version of a document is noted while another thread compares it",
        "Seen.read",
        "        with self._lock:\n",
        "        if True:\n",
        SEEN,
    ),
    bug(
        "two threads that look a path up get two nodes",
        "NodeTable.intern",
        "                node = self._nodes.get(number)\n                if isinstance(node, kind) and",
        "                if isinstance(node, kind) and",
        NODES,
    ),
    bug(
        "a lookup during a forget is not counted",
        "NodeTable.remember",
        "        with self._lock:\n",
        "        if True:\n",
        NODES,
    ),
    bug(
        "names are looked up in a directory that is half renamed",
        "NodeTable.move",
        "        with self._lock:\n",
        "        if True:\n",
        NODES,
    ),
    bug(
        "a thread reads on after it has handed the lead over",
        "Leadership.waiting",
        "        loop.resign()\n        self._leadership.release()\n",
        "        self._leadership.release()\n        loop.resign()\n",
        LEADERS,
    ),
    bug(
        "a request is postponed while a thread that has found none becomes idle",
        "Leadership._next_postponed",
        "            self._idle += 1\n            return None\n",
        "        self._idle += 1\n        return None\n",
        LEADERS,
    ),
    bug(
        "a reader gives up a fetch that is under way, and reads the bytes again",
        "ReadAhead.take",
        "            if self._threads.busy and fetch.data.cancel():",
        "            if self._threads.busy:",
        AHEAD,
    ),
    bug(
        "a chunk that a reader has read itself is fetched nevertheless",
        "ReadAhead._read",
        "                if fetch is not None and fetch.data.set_running_or_notify_cancel():\n",
        "                if fetch is not None:\n",
        AHEAD,
    ),
    bug(
        "a thread ends although it has just got a call",
        "DaemonThreads._work",
        "                    if self._jobs.empty():\n",
        "                    if True:\n",
        "tests/storage/test_retry.py",
    ),
]


class UnfitError(Exception):
    """The sources no longer contain the text that a bug replaces."""


def edited(top: Path, bug: Bug) -> None:
    """Put a bug into the sources below `top`. Raise UnfitError if a text is not there exactly once."""
    for function, old, new in bug.edits:
        path, start = place_of(top, function, old)
        text = path.read_text()
        path.write_text(text[:start] + new + text[start + len(old) :])


def place_of(top: Path, function: str, old: str) -> tuple[Path, int]:
    """Return file and offset of the one place of a text in a function. Raise UnfitError without exactly one."""
    places = [place for path in sorted((top / "shardfs").rglob("*.py")) for place in _places(path, function, old)]
    if len(places) != 1:
        raise UnfitError(f"found {len(places)} times in functions named {function}: {old}")
    return places[0]


def _places(path: Path, function: str, old: str) -> Iterator[tuple[Path, int]]:
    """Each place of the text `old` in a function of this qualified name: the file, and the offset."""
    text = path.read_text()
    if function.rpartition(".")[2] not in text or old not in text:
        return
    lines = text.splitlines(keepends=True)
    for name, first, last in _functions(ast.parse(text), ""):
        if name == function:
            start, stop = len("".join(lines[:first])), len("".join(lines[:last]))
            yield from ((path, m.start()) for m in re.finditer(re.escape(old), text) if start <= m.start() < stop)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    """Qualified name, lines before the function, and last line of each function in a syntax tree."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield f"{prefix}{child.name}", child.lineno - 1, child.end_lineno or child.lineno


def seed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Put a bug, by its name, into the functions of this process."""
    for function, old, new in next(bug for bug in BUGS if bug.name == name).edits:
        path, start = place_of(ROOT, function, old)
        text = path.read_text()
        code = compile(text[:start] + new + text[start + len(old) :], str(path), "exec", dont_inherit=True)
        live: Any = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for part in function.split("."):
            live = getattr(live, part)
            code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == part)
        monkeypatch.setattr(getattr(live, "__wrapped__", live), "__code__", code)


def found(bug: Bug, seconds: float, *, first: bool) -> str:
    """The test that finds it; "" if none does. `first`: of those that are meant to."""
    top = Path(tempfile.mkdtemp(prefix="shardfs-bug-"))
    try:
        for name in ("shardfs", "tests", "pyproject.toml", "docs", "scripts"):
            target = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            target(ROOT / name, top / name)
        edited(top, bug)
        for tests in (*bug.found_by, *([] if first else ["tests/write"])):
            test = _failing(top, tests, seconds)
            if test:
                return test
        return ""
    finally:
        shutil.rmtree(top, ignore_errors=True)


def _failing(top: Path, tests: str, seconds: float) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "SHARDFS_TORTURE"} | {"PYTHONPATH": str(top)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", tests]
    process = subprocess.Popen(
        command, cwd=top, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said = process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"{tests} does not end"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    if failed:
        return failed[1]
    return "" if process.returncode in (0, 5) else f"{tests}: status {process.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of bugs' names; all by default")
    parser.add_argument("--first", action="store_true", help="only the tests that are meant to find it")
    parser.add_argument("--seconds", type=float, default=1200, help="for one run of tests")
    options = parser.parse_args()
    chosen = [b for b in BUGS if not options.names or any(name in b.name for name in options.names)]
    missed = 0
    for one in chosen:
        begin = time.monotonic()
        test = found(one, options.seconds, first=options.first)
        missed += not test
        print(f"{'found ' if test else 'MISSED'} {time.monotonic() - begin:5.0f} s  {one.name}: {test}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
