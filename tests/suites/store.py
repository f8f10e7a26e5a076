"""What every `Store` must do."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from shardfs.model.blobs import ByteRange, Suffix
from shardfs.storage.cached_store import CachedBlob
from shardfs.storage.remote import FsspecBlob

if TYPE_CHECKING:
    from shardfs.model.blobs import ByteRequest
    from shardfs.storage.store import Store

DIGITS = bytes(range(256)) * 20
FILES = {
    "a/digits": DIGITS,
    "a/info": b'{"a": 1}',
    "a/zarr.json": b"{}",
    "a/b/empty": b"",
    "a/b/one": b"x",
    "top": b"top file",
}


class StoreSuite:
    """Subclass it with a fixture `store` that holds `FILES`."""

    lists = True
    """Whether the store can list a directory and tell one from a file."""

    def test_reads_ranges_and_suffixes(self, store: Store) -> None:
        blob = store.open("a/digits")
        requests: list[ByteRequest] = [
            ByteRange(0, 4),
            Suffix(3),
            ByteRange(1000, 1300),
            ByteRange(7, 7),
            ByteRange(300, 310),
        ]
        assert blob.read(requests) == [DIGITS[:4], DIGITS[-3:], DIGITS[1000:1300], b"", DIGITS[300:310]]
        single: list[tuple[ByteRequest, bytes]] = [
            (ByteRange(5, 9), DIGITS[5:9]),
            (Suffix(16), DIGITS[-16:]),
            (ByteRange(3, 3), b""),
        ]
        for request, wanted in single:
            assert blob.read([request]) == [wanted]
        assert blob.read([]) == []

    def test_is_short_where_the_object_ends(self, store: Store) -> None:
        blob = store.open("a/digits")
        n = len(DIGITS)
        assert blob.read([ByteRange(n - 3, n + 5)]) == [DIGITS[-3:]]
        assert blob.read([Suffix(n + 100)]) == [DIGITS]
        assert blob.read([ByteRange(n + 5, n + 9)]) == [b""]
        assert blob.read([ByteRange(0, 2), ByteRange(n - 3, n + 5)]) == [DIGITS[:2], DIGITS[-3:]]
        assert blob.read([ByteRange(0, 2), ByteRange(n + 5 + (2 << 20), n + 9 + (2 << 20))]) == [DIGITS[:2], b""]

    def test_overlapping_and_repeated_ranges(self, store: Store) -> None:
        requests = [ByteRange(10, 30), ByteRange(20, 25), ByteRange(0, 5), ByteRange(20, 25), ByteRange(29, 31)]
        assert store.open("a/digits").read(requests) == [DIGITS[r.start : r.stop] for r in requests]

    def test_stat(self, store: Store) -> None:
        stat = store.open("a/digits").stat()
        assert stat.size == len(DIGITS)
        assert stat.version == store.open("a/digits").stat().version
        assert store.open("a/b/one").stat().size == 1

    def test_an_empty_object(self, store: Store) -> None:
        assert store.open("a/b/empty").stat().size == 0
        assert store.open("a/b/empty").read([Suffix(20)]) == [b""]

    @pytest.mark.parametrize("key", ["missing", "a/missing", "a/missing/deeper", "top/below"])
    def test_what_does_not_exist(self, store: Store, key: str) -> None:
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            store.open(key).read([ByteRange(0, 1)])
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            store.open(key).read([Suffix(1)])
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            store.open(key).stat()
        with pytest.raises((FileNotFoundError, NotADirectoryError)):
            store.entry(key)
        assert list(store.scan(key)) == []

    def test_a_directory_is_no_object(self, store: Store) -> None:
        if not self.lists:
            pytest.skip("cannot tell")
        with pytest.raises(OSError) as e:  # noqa: PT011 - the errno is what counts
            store.open("a/b").stat()
        assert e.value.errno in (errno.EISDIR, errno.ENOENT)

    def test_entries(self, store: Store) -> None:
        entry = store.entry("a/digits")
        assert (entry.name, entry.directory) == ("digits", False)
        assert entry.stat is not None
        assert entry.stat.size == len(DIGITS)
        if self.lists:
            assert (store.entry("a/b").name, store.entry("a/b").directory) == ("b", True)
            assert store.entry("").directory

    def test_scan(self, store: Store) -> None:
        if not self.lists:
            pytest.skip("cannot list")
        assert {(e.name, e.directory) for e in store.scan("")} == {("a", True), ("top", False)}
        entries = {e.name: e for e in store.scan("a")}
        assert set(entries) == {"digits", "info", "zarr.json", "b"}
        assert entries["b"].directory
        assert {e.name for e in store.scan("a/b")} == {"empty", "one"}
        stat = entries["digits"].stat
        assert stat is None or stat.size == len(DIGITS)
        assert list(store.scan("top")) == []

    def test_documents(self, store: Store) -> None:
        assert store.documents("a", ["zarr.json", "info"], 100) == {"zarr.json": b"{}", "info": b'{"a": 1}'}
        assert store.documents("a/b", ["zarr.json", "info"], 100) == {}
        assert store.documents("missing", ["zarr.json", "info"], 100) == {}
        assert store.documents("", ["top", "info"], 100) == {"top": b"top file"}
        assert store.documents("", ["top"], 100) == {"top": b"top file"}
        assert store.documents("", ["other"], 100) == {}

    def test_documents_are_cut_behind_the_limit(self, store: Store) -> None:
        assert store.documents("a", ["digits", "info"], 10)["digits"] == DIGITS[:11]

    def test_reopen_forgets(self, store: Store) -> None:
        store.open("a/digits").read([ByteRange(0, 1)])
        store.reopen("a/digits")
        store.reopen("missing")
        assert store.open("a/digits").read([ByteRange(0, 1)]) == [DIGITS[:1]]

    def test_a_descriptor_holds_the_bytes_where_it_says(self, store: Store) -> None:
        blob = store.open("a/digits")
        assert (blob.fd < 0) == store.remote == isinstance(blob, FsspecBlob | CachedBlob)
