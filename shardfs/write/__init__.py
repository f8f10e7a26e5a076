"""Writing to sources: the overlay of changes on the unsharded tree, the journal, and publishing into shards."""
