"""cross_entropy: what a caller passes, and what answers."""
