"""The unsharded tree for reading: datasets, directories, inode numbers and attributes."""
