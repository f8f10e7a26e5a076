"""How chunks are laid out in a shard, one file per format. Bytes and arithmetic, no I/O."""
