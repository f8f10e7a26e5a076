"""Shard formats: how chunks lie in a shard object. Bytes and arithmetic only; nothing here reads anything."""

MAX_INDEX_BYTES = (32 << 20) + 4096
"""The largest index page that is decoded: 2**21 chunks and their checksum. A size beyond it is taken for damage,
so that a hostile size allocates nothing."""
