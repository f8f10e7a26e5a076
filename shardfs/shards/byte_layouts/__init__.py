"""Byte layouts of shards, one module per format. Bytes and arithmetic only, no I/O."""
