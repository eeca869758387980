"""The specs of reductions."""
