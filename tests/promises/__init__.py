"""What the documentation promises of written data, in each combination of store, form, layout and program."""
