"""What a row is: its columns, whose code it is of, where it lies, and what is read from it alone."""
