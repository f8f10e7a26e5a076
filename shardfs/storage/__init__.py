"""Access to stored objects, local and remote: caching, retries, atomic replacement.

All calls that change a local disk are in `syscalls`.
"""
