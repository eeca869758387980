"""A run on the machine: what is chosen, compiled, timed, profiled, and published as rows."""
