"""`python -m shardfs`."""

from shardfs.cli import main

main()
