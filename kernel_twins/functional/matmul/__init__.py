"""matmul and linear: what a caller passes, and what answers."""
