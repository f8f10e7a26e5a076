"""Conformance suites: what shard formats, stores and views must do, run unchanged by each of them."""

from tests.suites.shard_format import Sample, ShardFormatSuite
from tests.suites.store import StoreSuite
from tests.suites.view import Sparse, ViewSuite

__all__ = ["Sample", "ShardFormatSuite", "Sparse", "StoreSuite", "ViewSuite"]
