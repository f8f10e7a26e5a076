"""What docs/durability.md says of kinds of files and of operations, as small cases.

Each is run on an array of its own, on a writable mount and, where no kernel is needed, on the tree itself over
`memory://`. `python -m tests.write.semantics MOUNT SOURCE` prints as JSON what failed.
"""
