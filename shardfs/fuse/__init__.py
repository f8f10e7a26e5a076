"""The FUSE face of a `Tree`: `lowlevel` speaks with the kernel, `server` decides what to say."""
