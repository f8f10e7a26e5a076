"""What records come to: by example, and against a plain dictionary."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from shardfs.write.journal import Position, Record, RecordKind
from shardfs.write.pending import Pending
from shardfs.write.stored import ABSENT, Stored

if TYPE_CHECKING:
    from collections.abc import Callable

DIGEST = "6b86b273ff34fce19d6b804eff5a3f57"


def recorder() -> Callable[..., Record]:
    numbers = count(1)

    def record(kind: RecordKind, data: bool = False, **meta: Any) -> Record:
        lsn = next(numbers)
        return Record(lsn, kind, meta, Position(1, lsn * 4096, 10, 0) if data else None)

    return record


def put(record: Callable[..., Record], path: str, **meta: Any) -> Record:
    return record(RecordKind.PUT, data=True, path=path, mtime_ns=5, mode=0o644, **meta)


def test_what_was_published_is_the_base_of_a_later_version() -> None:
    record, pending = recorder(), Pending()
    pending.apply(put(record, "c/0", base=None))
    pending.apply(record(RecordKind.BEGIN, key="shard", lsns=[1], temp="t"))
    assert pending.apply(put(record, "c/0")) == [1]
    free = pending.apply(record(RecordKind.DONE, key="shard", lsns=[1], entries={"c/0": DIGEST}))
    assert free == [2]  # DONE itself says what the base is
    assert pending.versions["c/0"].base == Stored(None, (DIGEST,))
    assert sorted(pending.apply(record(RecordKind.DONE, key="shard", lsns=[3], entries={"c/0": ABSENT}))) == [3, 4, 5]


def test_a_publish_of_other_chunks_of_the_shard_changes_only_the_version() -> None:
    record, pending = recorder(), Pending()
    for path, base in (("c/0", Stored((1, 2))), ("c/1", Stored((1, 2), (DIGEST,))), ("c/2", Stored((9, 9)))):
        pending.apply(put(record, path, base=base.to_json()))
    done_record = record(
        RecordKind.DONE, key="shard", entries={}, before=[1, 2], after=[3, 4], kept=["c/0", "c/1", "c/2"]
    )
    assert pending.apply(done_record) == []
    bases = {path: version.base for path, version in pending.versions.items()}
    assert bases == {"c/0": Stored((3, 4)), "c/1": Stored((3, 4), (DIGEST,)), "c/2": Stored((9, 9))}
    for path in ("c/0", "c/1"):
        pending.apply(put(record, path))
    assert pending.versions["c/0"].base == Stored((3, 4))


def test_a_move_of_what_was_lost_is_told() -> None:
    record, pending = recorder(), Pending()
    pending.apply(put(record, "a"))
    put(record, "a")  # the one that is damaged
    pending.apply(record(RecordKind.MOVE, **{"from": "a", "to": "b", "lsn": 2}))
    assert pending.lost == {"b": 3}
    assert list(pending.versions) == ["a"]


def test_a_move_that_was_done_with_is_not_lost() -> None:
    """The record with the data was unlinked, an older version of the same path was not."""
    record, pending = recorder(), Pending()
    put(record, "t")
    pending.apply(put(record, "x"))
    pending.apply(record(RecordKind.MOVE, **{"from": "t", "to": "x", "lsn": 1}))
    pending.apply(record(RecordKind.DONE, key="s", lsns=[3], entries={"x": DIGEST}))
    assert pending.versions == {}
    assert pending.lost == {}


PATHS = ("c/0", "c/1", "c/2", "t")
STEPS = st.lists(
    st.tuples(st.sampled_from(("put", "del", "move", "done")), st.sampled_from(PATHS), st.sampled_from(PATHS)),
    max_size=40,
)


@given(STEPS)
def test_versions_are_those_of_a_dictionary_and_every_record_is_freed_once(
    steps: list[tuple[str, str, str]],
) -> None:
    record, pending = recorder(), Pending()
    model: dict[str, int | None] = {}  # the LSN of the record with the data
    written: list[Record] = []
    freed: list[int] = []

    def apply(new: Record) -> None:
        written.append(new)
        freed.extend(pending.apply(new))

    for step, path, other in steps:
        version = pending.versions.get(path)
        if step == "put":
            apply(put(record, path))
            model[path] = written[-1].lsn
        elif step == "del":
            apply(record(RecordKind.DEL, path=path))
            model[path] = None
        elif step == "done" and version:
            apply(record(RecordKind.DONE, key="s", lsns=[version.lsn], entries={path: ABSENT}))
            del model[path]
        elif step == "move" and version and version.data and path != other:
            apply(record(RecordKind.MOVE, **{"from": path, "to": other, "lsn": version.lsn}))
            model[other] = model.pop(path)
        starts = {p: v.data and v.data.start // 4096 for p, v in pending.versions.items()}
        assert starts == model
    assert len(freed) == len(set(freed))
    # What is left says the same; and so does whatever was unlinked, oldest first, among what is freed.
    unfreed = [r for r in written if r.lsn not in freed]
    for start in range(len(written)):
        again = Pending(sorted({r.lsn: r for r in [*unfreed, *written[start:]]}.values()))
        assert again.versions == pending.versions
        assert again.lost == {}
