"""The unsharded tree as an fsspec file system."""
