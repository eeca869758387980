"""reduction_nd v05_split: several programs share an output if outputs are few.

Change:   every tile's chunks are split into as many parts as fill the GPU with programs; each program writes its part's
          total to a workspace. A second kernel merges the parts of an output, always in the same order. Tile size,
          number of warps and programs an SM are searched over the list below (see tuning.py). Where the compiler does
          not see multiples of 16 bytes, accesses are spelled out: along long runs from the first whole vector on, the
          ends one by one; down columns as wide as all distances allow. Many columns give each lane whole ones, and a
          tile of short runs holds several.
Why:      the statistics of 64 channels are 64 outputs for 132 SMs, and a sum over all axes is one output. Parts occupy
          all SMs, and every run gives the same bits. CUDA's last block saves the second launch, which costs a
          microsecond or two if there are parts.
Error:    as v04's for the elements of a part, and its merging adds at most one rounding for every 128 parts, and 11.
          Lanes with whole columns add R <= 4,096 elements one after the other.
Counter:  time stays if there are enough tiles, and falls most if there is one.
Requires: nothing. If no axis is contiguous, tiles lie along the axis with the smallest stride.
Twin:     cuda-kernels/reduction/reduction_nd/v05_split.cu
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_twins._triton.lib import plans, tuning
from kernel_twins._triton.lib.device import sm_count
from kernel_twins._triton.reduction.reduction_nd.axes import Axes, along_reduced, count, least_padded, split
from kernel_twins._triton.reduction.reduction_nd.totals import (
    NOWHERE,
    add,
    later,
    merge,
    none,
    place_of,
    reduce,
    run_of,
    store,
)

WIDEST = 256  # columns of a tile
LONG_RUN = 16  # vectors of a run, from which on its ends are worth a load of their own
SHORT_RUN = 64  # elements of a run, below which a tile holds several
LONGEST = 4096  # elements of whole columns, whose sum's error grows with them
IN_TURN = tl.constexpr(4)  # rows that lanes with whole columns add in turn, whose loads are in flight together
MOST_WAVES, FEWEST_CHUNKS = 4, 16  # of parts along rows, and a part's chunks if they are more than one wave
ALONE = 4  # times as many elements and warps, if it is one program
MERGED_TILE, OUTPUTS, MERGING_WARPS = 2048, 16, 4  # the second kernel's tile: elements, most outputs; its warps

CONFIGS = [
    triton.Config({"TILE": size, "PER_SM": per_sm}, num_warps=warps)
    for size, per_sm, warps in ((4096, 8, 4), (2048, 8, 4), (4096, 4, 8), (8192, 4, 8), (8192, 2, 16))
]


def blocks_of(args: dict[str, Any]) -> tuple[int, int, int]:
    """Outputs, elements and runs of a tile; half as many elements for argmax, whose indices take registers.

    A tile of elements of one row lies along many columns: each lane then has whole columns, and nothing is exchanged.
    """
    tile, elements = args["TILE"] // (2 if args["KIND"] == "argmax" else 1), max(args["elements"], 1)
    if args["ALONG"]:
        run = max(args["sizes"][-1], 1)
        block_r, runs = min(triton.next_power_of_2(run), tile), 1
        block_k = least_padded(args["outputs"], tile // block_r)
        if run < SHORT_RUN and len(args["sizes"]) == 2:  # with more axes, each lane would divide its run's number
            runs = min(tile // (block_k * block_r), triton.next_power_of_2(elements // run))
        return block_k, block_r * runs, runs
    line = args["kept_sizes"][-1]
    wide = least_padded(line, args["TILE"] // 4)
    tiles = args["outputs"] // line * triton.cdiv(line, wide)
    if elements <= LONGEST and wide > WIDEST and tiles >= args["PER_SM"] * sm_count(args["x"].device):
        return wide, 1, 1
    block_k = min(triton.next_power_of_2(line), WIDEST)
    return block_k, min(tile // block_k, triton.next_power_of_2(elements)), 1


def grid_of(args: dict[str, Any]) -> tuple[int, int]:
    """Tiles, and parts a tile: as many as fill the GPU, as long as each has a chunk.

    Parts of many chunks are divided further: programs that outnumber their places fill the last wave, and slow SMs take
    fewer of them.
    """
    block_k, block_r, runs = blocks_of(args)
    run = args["sizes"][-1] if args["ALONG"] else args["elements"]
    chunks = triton.cdiv(args["elements"] // max(run, 1), runs) * triton.cdiv(run, block_r // runs)
    line = args["outputs"] if args["ALONG"] else args["kept_sizes"][-1]
    tiles = args["outputs"] // line * triton.cdiv(line, block_k)
    places = args["PER_SM"] * sm_count(args["x"].device)
    waves = 1
    if args["ALONG"] and tiles < places:
        waves = max(min(tiles * chunks // (places * FEWEST_CHUNKS), MOST_WAVES), 1)
    return tiles, max(min(waves * places // tiles, chunks), 1)


def vector_of(args: dict[str, Any]) -> int:
    """Elements of an access that the kernel has to spell out; 1 if there are none, or the compiler sees them by itself.

    Along runs that start anywhere they are counted from the first multiple of 16 bytes. Down columns all runs must be
    whole numbers of them.
    """
    x, inner = args["x"], "strides" if args["ALONG"] else "kept_strides"
    steps = [*args["kept_strides"], *args["strides"]]
    steps.remove(args[inner][-1])
    run = args["sizes" if args["ALONG"] else "kept_sizes"][-1]
    vector = 16 // x.element_size()
    if x.data_ptr() % 16 or args[inner][-1] != 1 or all(size % 16 == 0 for size in (*steps, run)):
        return 1
    if args["ALONG"]:
        return vector if run >= LONG_RUN * vector else 1
    return math.gcd(vector, run, *steps)


@triton.autotune(CONFIGS, key=["outputs", "elements", "KIND", "ALONG"], cache_results=True, do_bench=tuning.bench)
@triton.heuristics(
    {
        "BLOCK_K": lambda args: blocks_of(args)[0],
        "BLOCK_R": lambda args: blocks_of(args)[1],
        "RUNS": lambda args: blocks_of(args)[2],
        "SPLIT": lambda args: grid_of(args)[1] > 1,
        "VECTOR": vector_of,
    }
)
@triton.jit
def reduction_nd_v05_split_kernel(
    x, out, parts, part_places, kept_sizes, kept_strides, kept_steps, sizes, strides, steps, outputs, elements, divisor,
    KIND: tl.constexpr, ALONG: tl.constexpr, TILE: tl.constexpr, PER_SM: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, RUNS: tl.constexpr, SPLIT: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    # x, out: addressed by the kept axes and the reduced axes. parts, and for argmax part_places: [parts, outputs]. A
    # tile is [BLOCK_K, BLOCK_R], or down columns [BLOCK_R, BLOCK_K]. Along rows BLOCK_R covers RUNS runs, if several.
    LAST: tl.constexpr = len(sizes) - 1 if ALONG else len(kept_sizes) - 1
    # argmax along one axis meets a lane's elements in their order, and keeps when it met the largest.
    COUNTS: tl.constexpr = KIND == "argmax" and len(sizes) == 1
    TURNS: tl.constexpr = IN_TURN if BLOCK_R == 1 else 1
    program, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    if ALONG:
        output = program * BLOCK_K + tl.arange(0, BLOCK_K)
        offset, step = place_of(output, kept_sizes, kept_strides, kept_steps)
        inside = output < outputs
        pointers = x + offset[:, None]
        run = sizes[LAST]
        in_chunk = tl.arange(0, BLOCK_R)[None, :]
        WIDTH: tl.constexpr = BLOCK_R // RUNS
        chunks = (run - 1) // WIDTH + 1  # tl.cdiv adds first, which wraps near 2^31
        runs = elements // tl.maximum(run, 1)
        all_chunks = tl.cdiv(runs, RUNS) * chunks
        each = tl.cdiv(all_chunks, count)
        begin, end = part * each, tl.minimum((part + 1) * each, all_chunks)
        values, places = none((BLOCK_K, BLOCK_R), KIND)
        if COUNTS:
            places = tl.full((BLOCK_K, BLOCK_R), -1, dtype=tl.int32)
        if VECTOR > 1:
            end_values, end_places = none((BLOCK_K, 2 * VECTOR), KIND)
            in_ends = tl.arange(0, 2 * VECTOR)[None, :]
        for chunk in tl.range(begin, end, loop_unroll_factor=2 if COUNTS else 1):  # two loads in flight
            if RUNS > 1:
                number = chunk * RUNS + in_chunk // WIDTH
                outer, at = run_of(number, sizes, strides, steps)
                index = in_chunk % WIDTH
                mask = inside[:, None] & (index < run) & (number < runs)
                where = pointers + outer + index * strides[LAST]
                values, places = add(values, places, where, at + index * steps[LAST], mask, KIND)
            else:
                outer, at = run_of(chunk // chunks if LAST > 0 else chunk * 0, sizes, strides, steps)
                index = (chunk % chunks if LAST > 0 else chunk) * BLOCK_R + in_chunk
                if VECTOR == 1:
                    mask = inside[:, None] & (index < run)
                    where, place = pointers + outer + index * strides[LAST], at + index * steps[LAST]
                else:
                    # Vectors from the first whole one on, which `head` elements precede. The mask is the same for each.
                    start = tl.cdiv(offset[:, None] + outer, VECTOR) * VECTOR
                    head = start - (offset[:, None] + outer)
                    whole = (run - head) // VECTOR
                    mask = inside[:, None] & (index // VECTOR < whole)
                    where, place = x + start + index, at + (head + index) * steps[LAST]
                if COUNTS:
                    values, places = later(values, places, where, (chunk - begin).to(tl.int32), mask)
                else:
                    values, places = add(values, places, where, place, mask, KIND)
                if VECTOR > 1 and LAST > 0:  # the elements before and behind them, with the run's first chunk
                    index = tl.where(in_ends < VECTOR, in_ends, head + whole * VECTOR + in_ends - VECTOR)
                    mask = inside[:, None] & (index < tl.where(in_ends < VECTOR, head, run)) & (chunk % chunks == 0)
                    where = pointers + outer + index
                    end_values, end_places = add(end_values, end_places, where, at + index * steps[LAST], mask, KIND)
        if COUNTS:
            index = (begin + places) * BLOCK_R + in_chunk
            if VECTOR > 1:
                index += tl.cdiv(offset[:, None], VECTOR) * VECTOR - offset[:, None]
            places = tl.where(places < 0, NOWHERE, index * steps[0])
        value, place = reduce(values, places, 1, KIND)
        if VECTOR > 1:
            if LAST == 0:  # of the only run, with the first part
                head = tl.cdiv(offset[:, None], VECTOR) * VECTOR - offset[:, None]
                index = tl.where(in_ends < VECTOR, in_ends, head + (run - head) // VECTOR * VECTOR + in_ends - VECTOR)
                mask = inside[:, None] & (index < tl.where(in_ends < VECTOR, head, run)) & (part == 0)
                end_values, end_places = add(
                    end_values, end_places, pointers + index, index.to(tl.int64) * steps[0], mask, KIND
                )
            end_value, end_place = reduce(end_values, end_places, 1, KIND)
            value, place = merge(value, place, end_value, end_place, KIND)
        if COUNTS:  # if nothing is above -inf, the first element counts, which the first part has
            place = tl.where((value == -float("inf")) & (part == 0), 0, place)
    else:
        run = kept_sizes[LAST]
        blocks = (run - 1) // BLOCK_K + 1
        column = program % blocks * BLOCK_K + tl.arange(0, BLOCK_K)
        output = program // blocks * run + column
        offset, first = run_of(program // blocks, kept_sizes, kept_strides, kept_steps)
        step = first + column * kept_steps[LAST]
        inside = column // VECTOR < run // VECTOR
        pointers = x + offset // VECTOR * VECTOR + column[None, :] * kept_strides[LAST]
        each = tl.cast((elements - 1) // BLOCK_R // count + 1, tl.int64) * BLOCK_R
        begin, end = part * each, tl.minimum((part + 1) * each, elements)
        values, places = none((BLOCK_R, BLOCK_K), KIND)
        if COUNTS:
            places = tl.full((BLOCK_R, BLOCK_K), -1, dtype=tl.int32)
        for start in tl.range(begin, end, BLOCK_R * TURNS):
            for turn in tl.static_range(TURNS):
                row = start + turn * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
                element, at = place_of(row, sizes, strides, steps)
                mask = inside[None, :] & (row < end)
                where = pointers + element // VECTOR * VECTOR
                if COUNTS:
                    now = (start - begin).to(tl.int32) + turn * BLOCK_R
                    values, places = later(values, places, where, now, mask)
                else:
                    values, places = add(values, places, where, at, mask, KIND)
        if COUNTS:
            row = begin + places + tl.arange(0, BLOCK_R)[:, None]
            places = tl.where(places < 0, NOWHERE, row * steps[0])
        value, place = reduce(values, places, 0, KIND)
        if COUNTS:
            place = tl.where((value == -float("inf")) & (part == 0), 0, place)
    if SPLIT:
        tl.store(parts + part * outputs + output, value, mask=inside)
        if KIND == "argmax":
            tl.store(part_places + part * outputs + output, place, mask=inside)
    else:
        store(out, step, value, place, divisor, inside, KIND)


@triton.jit
def reduction_nd_v05_split_merge_kernel(
    parts, part_places, out, kept_sizes, kept_strides, kept_steps, outputs, count, divisor,
    KIND: tl.constexpr, MERGED: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    _, step = place_of(output, kept_sizes, kept_strides, kept_steps)
    values, places = none((MERGED, OUTPUTS), KIND)
    for first in tl.range(0, count, MERGED):
        part = first + tl.arange(0, MERGED)[:, None]
        mask = (part < count) & (output < outputs)[None, :]
        where = part.to(tl.int64) * outputs + output[None, :]
        others = tl.load(parts + where, mask=mask, other=0.0 if KIND == "sum" else -float("inf"))
        other_places = others
        if KIND == "argmax":  # absent parts get an index beyond all others
            other_places = tl.load(part_places + where, mask=mask, other=2**62)
        values, places = merge(values, places, others, other_places, KIND)
    value, place = reduce(values, places, 0, KIND)
    store(out, step, value, place, divisor, output < outputs, KIND)


class Plan(NamedTuple):
    """The prepared launches of a call, for calls that differ only in values and in equally aligned addresses."""

    kernel: plans.Plan
    size: int  # elements of the workspace
    merge: plans.Plan | None


_plans: dict[tuple[Any, ...], Plan] = {}


def reduction_nd_v05_split(x: Tensor, *, out: Tensor, dims: tuple[int, ...] = (-1,), kind: str = "sum") -> None:
    """out = the sum of x over the axes dims, or mean, max or argmax; fp32, bf16 or fp16 in, argmax int64 out."""
    launch(_plans, run_first, x, out, dims, kind)


def launch(
    known: dict[tuple[Any, ...], Plan],
    first: Callable[[Tensor, Tensor, Axes, Axes, str], Plan | None],
    x: Tensor,
    out: Tensor,
    dims: tuple[int, ...],
    kind: str,
) -> None:
    """Launch by a plan that is known, or by ``first``, whose plan is known then."""
    key = x.shape, x.stride(), x.dtype, out.dtype, plans.alignment(x, out), tuple(dims), kind, x.get_device()
    plan = known.get(key)
    if plan is None or tuning.is_recording():
        plan = first(x, out, *split(x.shape, x.stride(), [dim % x.dim() for dim in dims], kind == "argmax"), kind)
        if plan is not None:
            plans.keep(known, key, plan)
        return
    parts, places = workspace(plan.size, kind, x.device)
    plan.kernel(x, out, parts, places)
    if plan.merge is not None:
        plan.merge(parts, places, out)


def workspace(size: int, kind: str, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The totals of the parts, and for argmax their indices."""
    parts = torch.empty(size, dtype=torch.float32, device=device)
    return parts, torch.empty(size, dtype=torch.int64, device=device) if kind == "argmax" else None


def run_first(x: Tensor, out: Tensor, kept: Axes, reduced: Axes, kind: str) -> Plan | None:
    """Run a problem without a plan and return its plan; None if it is empty, interpreted or captured."""
    outputs, elements = count(kept), count(reduced)
    if outputs == 0:
        return None
    along, KIND = along_reduced(kept, reduced), "sum" if kind == "mean" else kind
    divisor = float(elements) if kind == "mean" else 1.0
    kept_axes, reduced_axes = tuple(zip(*kept, strict=True)), tuple(zip(*reduced, strict=True))
    problem = tuning.problem_of(outputs, elements, dtype=x.dtype, kind=KIND, along="rows" if along else "columns")
    kernel, config = tuning.choose(reduction_nd_v05_split_kernel, "reduction_nd/v05_split", problem, x.device)
    behind, constants = (*kept_axes, *reduced_axes, outputs, elements, divisor), {"KIND": KIND, "ALONG": along}
    known = {
        "x": x, "kept_sizes": kept_axes[0], "sizes": reduced_axes[0], "outputs": outputs, "elements": elements,
    } | constants  # fmt: skip
    grid = lambda args: grid_of(known | {name: args[name] for name in ("TILE", "PER_SM")})  # noqa: E731
    size_of = lambda config: parts * outputs if (parts := grid(config)[1]) > 1 else 0  # noqa: E731
    if not config:
        most = max(size_of(each.kwargs) for each in CONFIGS)
        kernel[grid](x, out, *workspace(most, kind, x.device), *behind, **constants)
        kernel, config = kernel.fn, kernel.best_config.all_kwargs()
    size = size_of(config)
    parts, places = workspace(size, kind, x.device)
    first = plans.launch(kernel, grid, (x, out, parts, places), behind, constants | config)
    merge = merge_planes(out, parts, places, kept, reduced, kind, size // outputs)
    return None if first is None else Plan(first, size, merge)


def merge_planes(
    out: Tensor, parts: Tensor, places: Tensor | None, kept: Axes, reduced: Axes, kind: str, planes: int
) -> plans.Plan | None:
    """Merge planes of totals, if there are any. One program that merges many has many warps."""
    if planes == 0:
        return None
    outputs = count(kept)
    wide = min(triton.next_power_of_2(outputs), OUTPUTS)
    scale = 1 if outputs > OUTPUTS or kind == "argmax" else ALONE  # argmax's indices take the registers
    merged = min(triton.next_power_of_2(planes), scale * MERGED_TILE // wide)
    warps = MERGING_WARPS * scale
    tiles = {"KIND": "sum" if kind == "mean" else kind, "MERGED": merged, "OUTPUTS": wide, "num_warps": warps}
    behind = *zip(*kept, strict=True), outputs, planes, float(count(reduced)) if kind == "mean" else 1.0
    grid = (triton.cdiv(outputs, wide),)
    return plans.launch(reduction_nd_v05_split_merge_kernel, grid, (parts, places, out), behind, tiles)
