"""The drawings of docs/, one small SVG an idea. They show where data are and how they move, and no measured number."""

from __future__ import annotations

from kernel_twins._profiling.report.drawings import (
    common,
    hopper,
    linear,
    matmul_fp32,
    reduction,
    tensor_cores,
    vector_add,
)

DRAWINGS = {
    function.__name__.replace("_", "-"): function
    for function in (
        common.levels,
        common.grouped_order,
        common.pipeline,
        common.tuning,
        vector_add.one_element_a_thread,
        vector_add.grid_stride,
        vector_add.wide_loads,
        vector_add.independent_loads,
        vector_add.bulk_ring,
        vector_add.bulk_tile,
        reduction.interleaved_tree,
        reduction.sequential_tree,
        reduction.warp_shuffle,
        reduction.loads_in_flight,
        reduction.running_totals,
        reduction.atomic,
        reduction.last_block,
        reduction.polling,
        matmul_fp32.strided_access,
        matmul_fp32.coalesced_access,
        matmul_fp32.shared_tile,
        matmul_fp32.register_tile_1d,
        matmul_fp32.register_tile_2d,
        matmul_fp32.vectors_and_banks,
        matmul_fp32.warp_tile,
        tensor_cores.fragments,
        tensor_cores.swizzle,
        tensor_cores.split,
        tensor_cores.promotion,
        tensor_cores.lean_split,
        hopper.tma_tile,
        hopper.large_tile,
        hopper.producer_ring,
        hopper.two_consumers,
        hopper.persistent,
        hopper.multicast,
        hopper.staged_store,
        hopper.hilbert,
        hopper.split_tiles,
        hopper.unaligned_rows,
        hopper.roles_by_hand,
        hopper.early_start,
        hopper.turned_pieces,
        hopper.split_once,
        linear.fused_epilogue,
    )
}
