"""Work on all shards of a source, shared out over an executor: verify, compact, maps."""
