"""The specs of matrix products."""
