"""Conformance suites: what every shard format and every store must do, run unchanged by each of them."""

from tests.suites.shard_format import Sample, ShardFormatSuite
from tests.suites.store import StoreSuite

__all__ = ["Sample", "ShardFormatSuite", "StoreSuite"]
