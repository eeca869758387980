"""dropout_add: what a caller passes, and what answers."""
