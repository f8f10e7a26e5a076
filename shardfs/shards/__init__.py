"""Byte layouts of shards, the chunk store that reads them, and rewriting."""
