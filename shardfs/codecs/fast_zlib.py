"""The zlib module: zlib-ng if the extra `fast` is installed, else Python's own."""

try:
    from zlib_ng import zlib_ng as zlib
except ImportError:
    import zlib

__all__ = ["zlib"]
