"""layer_norm and rms_norm: what a caller passes, and what answers."""
