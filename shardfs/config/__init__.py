"""The table of options and the profiles."""
