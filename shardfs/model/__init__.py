"""Plain values, protocols and arithmetic that every other room uses."""
