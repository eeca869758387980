"""Loading, checking and timing a step; and a GPU's measured limits."""
