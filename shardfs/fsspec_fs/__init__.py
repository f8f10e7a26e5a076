"""An fsspec file system that shows sharded datasets as one file per chunk."""
