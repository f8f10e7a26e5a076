"""shardfs: sharded n-d datasets as one file per chunk."""

__version__ = "0.1.0"
