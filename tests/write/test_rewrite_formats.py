"""Shards rewritten by their formats, against models of what they should hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.strategies import sharding_indexed_samples, uint64_sharded_id_samples, uint64_sharded_samples
from tests.suites.rewriting import RewriteSuite

if TYPE_CHECKING:
    from hypothesis import strategies as st

    from tests.suites.shard_format import Sample


class TestShardingIndexed(RewriteSuite):
    def samples(self) -> st.SearchStrategy[Sample]:
        return sharding_indexed_samples()


class TestUint64Sharded(RewriteSuite):
    def samples(self) -> st.SearchStrategy[Sample]:
        return uint64_sharded_samples()


class TestUint64ShardedIds(RewriteSuite):
    def samples(self) -> st.SearchStrategy[Sample]:
        return uint64_sharded_id_samples()
