"""The FUSE face of a tree: `libfuse` mounts it, `protocol` has the kernel's messages, `server` answers requests."""
