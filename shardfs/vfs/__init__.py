"""The unsharded tree to be read: discovery, directories, inodes, attributes."""
