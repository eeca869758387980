"""sum, mean, amax and argmax along any dimensions: what a caller passes, and what answers."""
