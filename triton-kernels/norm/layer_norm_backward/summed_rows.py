"""A norm's backward pass for rows that a few warps hold: resident programs hold chunks, and the sums of their columns.

As held_rows.py, but programs stay, for every lane keeps the weights and the sums of its columns in registers. Rows
travel ahead to shared memory by asynchronous copies. A second kernel adds the programs' sums, always in the same order.

With EDGES rows have every skew. A lane's row is always one of the same skew, so it has the same columns of all of its
rows: packs between the row's ends, and at the ends single elements. These are too narrow for asynchronous copies, so
registers load them a turn ahead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.norm.layer_norm.held_rows import as_it_came
from kernel_twins._triton.norm.layer_norm_backward.column_sums import SUM_WARPS, norm_backward_sum_kernel, summing
from kernel_twins._triton.norm.layer_norm_backward.v02_persistent import row_sums
from kernel_twins._triton.norm.routing import Summed


@triton.jit
def _start(row, stride, VECTOR: tl.constexpr):
    # Of a row's first whole vector, written so that the compiler sees a multiple of VECTOR.
    return tl.cdiv(row * stride, VECTOR) * VECTOR


@triton.jit
def _masks(col, vectors, CHUNKS: tl.constexpr, FULL: tl.constexpr, VECTOR: tl.constexpr):
    # Of the chunks behind the FULL ones; one comparison a vector, so that it is loaded as one.
    masks = ()
    for chunk in tl.static_range(FULL, CHUNKS):
        masks += ((col + chunk * col.shape[1]) // VECTOR < vectors,)
    return masks


@triton.jit
def _chunks(rows, inside, masks, CHUNKS: tl.constexpr, FULL: tl.constexpr):
    # The chunks of rows as they are in memory; rows that are not inside are 0.
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        mask = inside if chunk < FULL else inside & masks[chunk - FULL]
        tiles += (tl.load(rows + chunk * rows.shape[1], mask=mask, other=0.0),)
    return tiles


@triton.jit
def _means(products, sums, N, CENTERED: tl.constexpr):
    # Of every row; only layer_norm needs that of the gradient.
    if CENTERED:
        product_sum, gradient_sum = row_sums(products, sums)
    else:
        product_sum = tl.sum(products, axis=1, keep_dims=True)
        gradient_sum = tl.zeros_like(product_sum)
    return product_sum / N, gradient_sum / N


@triton.jit
def norm_backward_summed_rows_kernel(
    dout, x, mean, rstd, weight, dadded, dx, partials, M: tl.int64, N, stride_dm: tl.int64, stride_xm: tl.int64,
    stride_am: tl.int64, ROWS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK_N: tl.constexpr, FULL: tl.constexpr,
    VECTOR: tl.constexpr, EDGES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # dout, x, dadded: [M, N]; mean, rstd: [M]; weight: [N]; dx: [M, N] contiguous; partials: [1 or 2, groups, N], of
    # dweight and, if there is a mean, of dbias. A group is a program, or with EDGES one of its ROWS lines. Missing
    # tensors are None.
    CENTERED: tl.constexpr = mean is not None
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    line, col = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_N)[None, :]
    # Columns count from the row's first whole vector, before which it has `head` elements.
    group = program * ROWS + line
    head = ((VECTOR - group * N % VECTOR) % VECTOR).to(tl.int32) if EDGES else 0
    vectors = (N - head) // VECTOR
    masks = _masks(col, vectors, CHUNKS, FULL, VECTOR)
    here = tl.full((ROWS, 1), True, tl.int1)
    # Read for every line, so that each lane has the weights of its elements.
    weights = _chunks((weight + head + col).broadcast_to((ROWS, BLOCK_N)), here, masks, CHUNKS, FULL)
    dweights, dbiases = (), ()
    for _ in tl.static_range(CHUNKS):
        dweights += (tl.zeros((ROWS, BLOCK_N), dtype=tl.float32),)
        dbiases += (tl.zeros((ROWS, BLOCK_N), dtype=tl.float32),)
    if EDGES:
        # VECTOR places before the first vector, VECTOR behind the last one, and the other lanes of the row idle.
        LANES: tl.constexpr = BLOCK_N // VECTOR
        edge = tl.arange(0, LANES)[None, :]
        edge_col = tl.where(edge < VECTOR, edge - head, vectors * VECTOR + edge - VECTOR)
        edge_held = edge_col < tl.where(edge < VECTOR, 0, N - head)
        edge_weights = tl.load(weight + head + edge_col, mask=edge_held, other=0.0).to(tl.float32)
        edge_mask = edge_held & (group < M)
        edge_dout = tl.load(dout + _start(group, stride_dm, VECTOR) + edge_col, mask=edge_mask, other=0.0)
        edge_x = tl.load(x + _start(group, stride_xm, VECTOR) + edge_col, mask=edge_mask, other=0.0)
        edge_dweight, edge_dbias = tl.zeros((ROWS, LANES), tl.float32), tl.zeros((ROWS, LANES), tl.float32)

    step = programs * ROWS
    for first in tl.range(program * ROWS, M, step, num_stages=STAGES):
        row = first + line
        inside = row < M
        gradients = _chunks(dout + _start(row, stride_dm, VECTOR) + col, inside, masks, CHUNKS, FULL)
        values = _chunks(x + _start(row, stride_xm, VECTOR) + col, inside, masks, CHUNKS, FULL)
        row_mean = tl.load(mean + row, mask=inside, other=0.0) if CENTERED else 0.0
        row_rstd = tl.load(rstd + row, mask=inside, other=0.0)
        products = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        sums = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        added_dweights, added_dbiases = (), ()
        for chunk in tl.static_range(CHUNKS):  # dout is 0 behind the row
            gradient = as_it_came(gradients[chunk], VECTOR)
            xhat = (as_it_came(values[chunk], VECTOR) - row_mean) * row_rstd
            added_dweights += (dweights[chunk] + gradient * xhat,)
            added_dbiases += (dbiases[chunk] + gradient if CENTERED else dbiases[chunk],)
            gradient *= as_it_came(weights[chunk], VECTOR)
            products += gradient * xhat
            sums += gradient
        dweights, dbiases = added_dweights, added_dbiases
        product_mean, gradient_mean = _means(products, sums, N, CENTERED)
        if EDGES:
            edge_gradient = edge_dout.to(tl.float32)
            edge_xhat = (edge_x.to(tl.float32) - row_mean) * row_rstd
            edge_dweight += edge_gradient * edge_xhat
            edge_dbias += edge_gradient
            edge_gradient *= edge_weights
            edge_products, edge_gradients = _means(edge_gradient * edge_xhat, edge_gradient, N, CENTERED)
            product_mean += edge_products
            gradient_mean += edge_gradients
            ahead = row + step
            edge_mask = edge_held & (ahead < M)
            edge_dout = tl.load(dout + _start(ahead, stride_dm, VECTOR) + edge_col, mask=edge_mask, other=0.0)
            edge_x = tl.load(x + _start(ahead, stride_xm, VECTOR) + edge_col, mask=edge_mask, other=0.0)
        dx_row = dx + _start(row, N, VECTOR)
        added_row = None if dadded is None else dadded + _start(row, stride_am, VECTOR)
        for chunk in tl.static_range(CHUNKS):
            gradient = as_it_came(gradients[chunk], VECTOR) * as_it_came(weights[chunk], VECTOR)
            xhat = (as_it_came(values[chunk], VECTOR) - row_mean) * row_rstd
            result = row_rstd * (gradient - gradient_mean - xhat * product_mean)
            mask = inside if chunk < FULL else inside & masks[chunk - FULL]
            if dadded is not None:
                result += tl.load(added_row + chunk * BLOCK_N + col, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_row + chunk * BLOCK_N + col, result.to(dx.dtype.element_ty), mask=mask)
        if EDGES:
            edge_mask = edge_held & inside
            result = row_rstd * (edge_gradient - gradient_mean - edge_xhat * product_mean)
            if dadded is not None:
                result += tl.load(added_row + edge_col, mask=edge_mask, other=0.0).to(tl.float32)
            tl.store(dx_row + edge_col, result.to(dx.dtype.element_ty), mask=edge_mask)

    if EDGES:  # lines have different columns
        partials += group * N + head
        distance = programs * ROWS * N
        for chunk in tl.static_range(CHUNKS):
            mask = here if chunk < FULL else masks[chunk - FULL]
            tl.store(partials + chunk * BLOCK_N + col, dweights[chunk], mask=mask)
            if CENTERED:
                tl.store(partials + distance + chunk * BLOCK_N + col, dbiases[chunk], mask=mask)
        tl.store(partials + edge_col, edge_dweight, mask=edge_held)
        if CENTERED:
            tl.store(partials + distance + edge_col, edge_dbias, mask=edge_held)
    else:
        partials += program * N
        for chunk in tl.static_range(CHUNKS):
            place = chunk * BLOCK_N + tl.arange(0, BLOCK_N)
            tl.store(partials + place, tl.sum(dweights[chunk], axis=0), mask=place < N)
            if CENTERED:
                tl.store(partials + programs * N + place, tl.sum(dbiases[chunk], axis=0), mask=place < N)


def norm_backward_summed_rows(
    route: Summed, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]
) -> Callable[..., None] | None:
    """Launch both kernels on dout, x, mean, rstd, weight, dadded, dx, dweight and dbias, and return a plan of them.

    ``sizes``: M, N, and the strides of rows of dout, x and dadded. Rows have the same skew in all matrices.
    """
    (M, N, *_), (dout, *_, dweight, dbias) = sizes, tensors
    assert dout is not None
    device, sums = dout.device, 1 if dbias is None else 2
    programs = route.programs(M, N, sm_count(device))
    groups = programs * route.rows if route.has_edges(N) else programs

    def workspace() -> Tensor:
        return torch.empty((sums, groups, N), dtype=torch.float32, device=device)

    partials = workspace()
    first = plans.launch(
        norm_backward_summed_rows_kernel, (programs,), (*tensors[:7], partials), sizes, route.constants(N)
    )
    grid, behind = summing(sums, groups, N, sm_count(device))
    second = plans.launch(norm_backward_sum_kernel, grid, (partials, dweight, dbias), behind, {"num_warps": SUM_WARPS})
    if first is None or second is None:
        return None

    def again(*tensors: Tensor) -> None:
        partials = workspace()
        first(*tensors[:7], partials)
        second(partials, *tensors[7:])

    return again
