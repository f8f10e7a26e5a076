"""Objects of a store: local, remote, cached, retried, replaced; and every call that changes a local disk."""
