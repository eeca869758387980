"""A step's compiled code, at every stage. No GPU is needed."""
