"""cross_entropy_backward of rows at any distance: packs that are counted on the gradient's rows, and single ends.

A pack of the gradient is written by one access of 16 bytes, since a store of single elements of a misaligned row leaves
sectors in parts. Where a row of logits has another skew, the pack is read by what both rows are multiples of: single
elements that neighbours read come from L1. The elements before a row's first pack and behind its last one are EDGES.

A row has a few lanes, so that its class, lse and factor are worked out by few, and a lane has few rows, so that
registers hold them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.loss.lanes import HELD, THREADS, WARPS, lanes_of, rows_of

VECTOR_BYTES = 16
LEAST_PACKS = 4  # of 16 bytes: a shorter row is mostly its ends
ROW_COST = 5  # elements that a lane computes in the time of what it computes once a row

LOG2_E = tl.constexpr(1.4426950408889634)


class Packed(NamedTuple):
    """A program has ``rows``, or one of ``parts`` of a row, in ``chunks`` of ``lanes`` packs of ``vector`` elements.

    ``read``: elements of an access that reads. The first ``full`` chunks need no mask but the rows'.
    """

    lanes: int
    rows: int
    parts: int
    chunks: int
    full: int
    vector: int
    read: int
    edges: bool

    def programs(self, M: int) -> int:
        return triton.cdiv(M, self.rows) * self.parts

    def constants(self) -> dict[str, int | bool]:
        return {
            "ROWS": self.rows, "CHUNKS": self.chunks, "LANES": self.lanes, "FULL": self.full,
            "VECTOR": self.vector, "READ": self.read, "EDGES": self.edges, "num_warps": WARPS,
        }  # fmt: skip


def packed(M: int, N: int, itemsize: int, strides: tuple[int, int], aligned: tuple[bool, bool], sms: int) -> Packed:
    """How rows of N elements lie in lanes. ``strides``, ``aligned``: of logits and gradient, to 16 bytes."""
    wide, (stride_lm, stride_om), (logits_aligned, out_aligned) = VECTOR_BYTES // itemsize, strides, aligned
    edges = out_aligned and N // wide >= LEAST_PACKS and math.gcd(wide, N, stride_om) < wide
    vector = (wide if edges else math.gcd(wide, N, stride_om)) if out_aligned else 1
    # Of a pack that is counted on the gradient's row: its distance from the logits' start is that of the skews.
    read = math.gcd(vector, stride_lm - stride_om if edges else math.gcd(N, stride_lm)) if logits_aligned else 1
    packs = N // vector
    lanes = lanes_of(packs, vector, itemsize, ROW_COST) or THREADS
    parts = triton.cdiv(packs, lanes * (HELD // vector))
    chunks = triton.cdiv(triton.cdiv(packs, parts), lanes)
    whole = N - edges * (vector - 1)  # elements of packs in any row, at least
    full = max(whole // vector - (parts - 1) * chunks * lanes, 0) // lanes
    return Packed(lanes, rows_of(M, lanes, chunks * vector, sms), parts, chunks, min(full, chunks), vector, read, edges)


@triton.jit
def _head(row, stride, VECTOR: tl.constexpr):
    # The elements of a row before its first pack.
    return ((VECTOR - row * stride % VECTOR) % VECTOR).to(tl.int32)


@triton.jit
def _numbers(target, lse, dout, row, M, N, stride_dm):
    # A row's class, lse and factor. A target that is no class makes the whole row NaN, as it makes the loss.
    row_class = tl.load(target + row, mask=row < M, other=0)
    row_lse, scale = tl.load(lse + row, mask=row < M), tl.load(dout + row * stride_dm, mask=row < M)
    return row_class, row_lse, tl.where((row_class >= 0) & (row_class < N), scale, float("nan"))


@triton.jit
def _gradient(values, is_class, row_lse, scale, ignored, wanted, smoothing):
    wanted = tl.where(is_class, wanted + (1.0 - smoothing), wanted)
    values = (tl.exp2((values.to(tl.float32) - row_lse) * LOG2_E) - wanted) * scale
    return tl.where(ignored, 0.0, values)


@triton.jit
def cross_entropy_backward_packed_rows_kernel(
    logits, target, lse, dout, out, M: tl.int64, N, stride_lm: tl.int64, stride_dm: tl.int64, stride_om: tl.int64,
    ignore_index: tl.int64, smoothing, PARTS,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, FULL: tl.constexpr, VECTOR: tl.constexpr,
    READ: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    # logits, out: [M, N]; target, lse, dout: [M]. out may be the logits: an element is read by the program that writes
    # it, before anything is written.
    part = tl.program_id(0) % PARTS
    row = (tl.program_id(0) // PARTS).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    known = row < M
    # Columns count from the row's first pack, before which it has `head` elements.
    head = _head(row, stride_om, VECTOR) if EDGES else 0
    packs = (N - head) // VECTOR
    # Written so that the compiler sees multiples of VECTOR and of READ.
    first_in, first_out = (row * stride_lm + head) // READ * READ, tl.cdiv(row * stride_om, VECTOR) * VECTOR
    pack = part * (CHUNKS * LANES) + tl.arange(0, LANES)[None, :, None]
    place = tl.arange(0, VECTOR)[None, None, :]

    # All loads come before the first result, and those of the row's numbers last: nothing is computed without them.
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        # The mask is the same for a whole pack, so that it is one access.
        inside = known if chunk < FULL else known & (pack + chunk * LANES < packs)
        tiles += (tl.load(logits + first_in + ((pack + chunk * LANES) * VECTOR + place), mask=inside),)
    if EDGES:  # VECTOR places before the first pack, and VECTOR behind the last one; the first part has both
        edge_row = row.reshape((ROWS, 1))
        edge_head = _head(edge_row, stride_om, VECTOR)
        edge = tl.arange(0, 2 * VECTOR)[None, :]
        edge_col = tl.where(edge < VECTOR, edge, edge_head + (N - edge_head) // VECTOR * VECTOR + edge - VECTOR)
        is_edge = (edge_row < M) & (edge_col < tl.where(edge < VECTOR, edge_head, N)) & (part == 0)
        edges = tl.load(logits + edge_row * stride_lm + edge_col, mask=is_edge)

    row_class, row_lse, scale = _numbers(target, lse, dout, row, M, N, stride_dm)
    if EDGES:  # the same numbers once more, for other lanes
        edge_class, edge_lse, edge_scale = _numbers(target, lse, dout, edge_row, M, N, stride_dm)
        edge_ignored = edge_class == ignore_index
    ignored, wanted = row_class == ignore_index, smoothing / N
    # Compared in 32 bits: a class fits them, and another target's row is NaN or ignored whatever is compared.
    behind = row_class.to(tl.int32) - head - pack * VECTOR
    for chunk in tl.static_range(CHUNKS):
        inside = known if chunk < FULL else known & (pack + chunk * LANES < packs)
        is_class = place + chunk * (LANES * VECTOR) == behind
        values = _gradient(tiles[chunk], is_class, row_lse, scale, ignored, wanted, smoothing)
        where = out + first_out + ((pack + chunk * LANES) * VECTOR + place)
        tl.store(where, values.to(out.dtype.element_ty), mask=inside)
    if EDGES:
        values = _gradient(edges, edge_col == edge_class, edge_lse, edge_scale, edge_ignored, wanted, smoothing)
        tl.store(out + edge_row * stride_om + edge_col, values.to(out.dtype.element_ty), mask=is_edge)


def cross_entropy_backward_packed_rows(
    way: Packed, tensors: tuple[Tensor, ...], sizes: tuple[int, ...], options: tuple[int, float]
) -> plans.Plan | None:
    """Launch the kernel on logits, target, lse, dout and out, and return the plan of it.

    ``sizes``: M, N < 2^31, and the distances of rows of logits, dout and out; ``options``: the ignored class and the
    smoothing.
    """
    grid, behind = (way.programs(sizes[0]),), (*sizes, *options, way.parts)
    return plans.launch(cross_entropy_backward_packed_rows_kernel, grid, tensors, behind, way.constants())
