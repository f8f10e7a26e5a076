"""Tests of what changes data: the disk, the journal, publishing."""
