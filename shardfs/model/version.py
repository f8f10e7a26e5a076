"""The version of shardfs."""

__version__ = "0.1.0"
