"""What the compilers make of a step. No GPU is needed."""
