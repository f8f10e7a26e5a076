"""Jobs over all shards of a source: verify, pack and unpack, which can run on an executor; compact, and maps."""
