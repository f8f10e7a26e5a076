"""Mutants: small changes of the package's code, one at a time, that a test should find (docs/mutation.md)."""
