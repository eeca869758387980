"""Loading, checking and timing a step; and what a GPU can do at most."""
