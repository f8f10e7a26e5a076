"""Shard formats: how chunks lie in a shard object. Bytes and arithmetic only; nothing here reads anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardfs.model import U64

MAX_INDEX_BYTES = (32 << 20) + 4096
"""The largest index page that is decoded: 2**21 chunks and their checksum. A size beyond it is taken for damage,
so that a hostile size allocates nothing."""


class SinglePage:
    """The part of `model.ShardFormat` that is the same for every shard whose index is one page without a root."""

    page_bits, blocks = 0, 1

    def block_of(self, page: int) -> int:
        return 0

    def root_request(self, block: int) -> None:
        return None

    def nonempty_pages(self, block: int, root: bytes | None) -> U64:
        return np.zeros(1, np.uint64)
