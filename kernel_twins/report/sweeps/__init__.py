"""Recordings that belong to no run of a ladder: what the compilers make of chosen kernels, stage by stage."""
