"""Programs that read a tree as any user of a library would: `python -m tests.clients.read_x PATH OUT.npy`.

Each runs in a process of its own, often under the Python of another virtualenv, and knows nothing of shardfs.
"""
