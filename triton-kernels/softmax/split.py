"""Where the parts of a split row begin and end: what softmax's and softmax_backward's two launches share."""

from __future__ import annotations

import triton
import triton.language as tl

from kernel_twins._triton.softmax.routes import Rows

NUM_WARPS = 4
PIECES = 4  # vectors that a thread has in flight
SINGLE_PIECES = 16  # elements that it has, where they are loaded one by one


@triton.jit
def part_of(N, head, part, PARTS, VECTOR: tl.constexpr):
    # The first and the last column of a part, counted from the row's first vector, which `head` elements precede.
    vectors = (N - head) // VECTOR
    share = tl.cdiv(vectors, PARTS)
    first = tl.minimum(part * share, vectors)
    return first * VECTOR, tl.minimum(first + share, vectors) * VECTOR


@triton.jit
def edges_of(N, head, part, VECTOR: tl.constexpr):
    # The columns of the elements before a row's first vector, in the first VECTOR places, and of those behind its last
    # one, counted from its first vector; and which places have one. They belong to the first part.
    edge = tl.arange(0, 2 * VECTOR)
    behind = (N - head) // VECTOR * VECTOR
    col = tl.where(edge < VECTOR, edge - head, behind + edge - VECTOR)
    return col, (col < tl.where(edge < VECTOR, 0, N - head)) & (part == 0)


def constants_of(rows: Rows, wide: bool) -> dict[str, int | bool]:
    """The constants of a launch over parts; ``wide``: its rows' skews are the same in all tensors."""
    vector = rows.vector if wide else 1
    return {
        "VECTOR": vector, "EDGES": wide and any(n % vector for n in (rows.N, *rows.strides)),
        "BLOCK": 32 * NUM_WARPS * vector, "PIECES": PIECES if wide else SINGLE_PIECES, "num_warps": NUM_WARPS,
    }  # fmt: skip
