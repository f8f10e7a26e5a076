"""Byte layouts of shards, the chunk store that reads shards, and the rewriting of shards."""
