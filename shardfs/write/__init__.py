"""Sources that are written: the tree with what was changed on top, and how that gets into shards."""
