"""Jobs over all shards of a source: verify, which can run on an executor, compact, and maps."""
