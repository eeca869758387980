"""Axes and kinds for reduction_nd's spec and the public functions on it."""

from __future__ import annotations

MOST_AXES = 5
KINDS = ("sum", "mean", "max", "argmax")


def require_dims(dims: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """dims counted from the front; IndexError if there is no such axis, ValueError if one is named twice."""
    if any(not -rank <= dim < rank for dim in dims):
        raise IndexError(f"dims is {tuple(dims)}, each must be from {-rank} to {rank - 1}: x has {rank} dimensions")
    axes = tuple(dim % rank for dim in dims)
    if len(set(axes)) < len(axes):
        raise ValueError(f"dims is {tuple(dims)}, must name no axis twice")
    return axes
