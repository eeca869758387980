"""softmax and log_softmax: what a caller passes, and what answers."""
