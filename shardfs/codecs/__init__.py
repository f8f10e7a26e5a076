"""Chunk bytes: codecs, checks, images, transcoding, and a subprocess for decoders that may crash."""
