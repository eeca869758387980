"""matmul_bf16 v17_prologue: a shorter prologue: less happens before a kernel's first product.

Change:   the host writes descriptors, which come with the launch, where every program wrote its own to device memory; a
          kernel is set up while the one before it ends (programmatic dependent launch); and a program that computes one
          tile has no loop over tiles. Operands come by descriptors alone; others are repacked.
Why:      the tensor cores need two microseconds for a product of 1024 x 1024 x 1024. To write descriptors, to make the
          copy engine see them, and to wait until the kernel before has left the GPU, took as long. At 4096 x 4096 that
          is a hundredth of the time. The step continues v15.
Counter:  time at small sizes falls; at 4096 x 4096 nothing changes.
Requires: compute capability 9.0; M, N and K below 2^31; nothing of strides.
Source:   CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; Triton's tutorial 09, for
          descriptors made by the host.
Twin:     none, see the spec: CUDA's maps are made by the host from v07_tma on, and v15_dispatch starts early.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_twins._triton.lib import tuning
from kernel_twins._triton.lib.device import Layout, layout_of, sm_count
from kernel_twins._triton.lib.workspace import COUNTERS, counter
from kernel_twins._triton.matmul.matmul_bf16.v15_dispatch import PLANS, _store, grid_of, repacked, sums_of, tiles_of

LARGEST_SIZE = 2**31  # descriptors count in 32 bits

CONFIGS = [
    triton.Config(
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": 8, "SPLIT_K": parts},
        num_warps=warps, num_stages=stages,
    )
    for m, n, k, warps, stages, parts in (
        (128, 128, 64, 8, 3, 1), (128, 256, 64, 8, 4, 1), (128, 256, 64, 8, 3, 1), (256, 128, 64, 8, 4, 1),
        (128, 128, 64, 4, 4, 1), (128, 128, 128, 8, 3, 1), (128, 128, 128, 4, 3, 1), (64, 256, 64, 4, 4, 1),
        (128, 64, 64, 4, 6, 1), (128, 64, 128, 4, 4, 1), (128, 64, 128, 8, 4, 1), (64, 128, 64, 4, 6, 1),
        (64, 128, 128, 4, 3, 1), (64, 128, 128, 4, 4, 1), (64, 64, 128, 4, 6, 1), (64, 32, 128, 4, 6, 1),
        (128, 256, 64, 8, 4, 2), (128, 128, 64, 8, 4, 2), (128, 128, 64, 8, 4, 4), (64, 256, 64, 4, 4, 2),
        (64, 128, 128, 4, 4, 2), (64, 128, 128, 4, 4, 4), (64, 64, 128, 4, 6, 2), (64, 64, 128, 4, 6, 4),
    )
]  # fmt: skip


def worth_timing(configs: list[triton.Config], args: dict[str, Any], **meta: Any) -> list[triton.Config]:
    """SPLIT_K where tiles are few; of those the eight with the best estimates, or all if the result is recorded."""
    M, N, sms = args["M"], args["N"], sm_count(args["out"].device)
    fit = [c for c in configs if c.kwargs["SPLIT_K"] == 1 or tiles_of(M, N, c.kwargs) <= sms]
    return fit if tuning.is_recording() else sorted(fit, key=lambda c: tuning.estimate(c, M, N, args["K"], sms))[:8]


def prepare(args: dict[str, Any]) -> bool:
    """Let descriptors, which a search shares between configurations, describe this one's blocks; return ONE_TILE."""
    a_block, b_block, out_block = blocks_of(args, args["out"])
    args["a_desc"].block_shape = a_block[::-1] if args["A_COL"] else a_block
    args["b_desc"].block_shape = b_block[::-1] if args["B_COL"] else b_block
    if args["out_desc"] is not None:
        args["out_desc"].block_shape = out_block
    return has_one_tile(args["M"], args["N"], args, args["out"].device)


@triton.autotune(
    CONFIGS,
    key=["M", "N", "K", "A_COL", "B_COL", "OUT_DESCRIBED"],
    prune_configs_by={"early_config_prune": worth_timing},
    cache_results=True,
    do_bench=tuning.bench,
)
@triton.heuristics({"ONE_TILE": prepare})
@triton.jit
def matmul_bf16_v17_prologue_kernel(
    a_desc, b_desc, out_desc, out, sums, tickets, M, N, K,
    A_COL: tl.constexpr, B_COL: tl.constexpr, OUT_DESCRIBED: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr, ONE_TILE: tl.constexpr,
):  # fmt: skip
    # a: [M, K], b: [K, N], what is column-major described as its transpose; out: [M, N] row-major, without a descriptor
    # where the copy engine cannot store it (which OUT_DESCRIBED tells the search); for SPLIT_K > 1 sums: [tiles,
    # SPLIT_K, BLOCK_M, BLOCK_N] and tickets: [tiles].
    if EARLY:
        # Programmatic dependent launch: the next kernel may be set up beside this one, as this one was beside the
        # kernel before it, which must be done before anything that it wrote or reads is touched.
        gdc_launch_dependents()
        gdc_wait()
    tiles_m = (M - 1) // BLOCK_M + 1
    tiles_n = (N - 1) // BLOCK_N + 1
    # All parts take the same number of steps; elements behind K are read as zeros.
    steps = (K - 1) // (BLOCK_K * SPLIT_K) + 1
    # A range of one element is one turn, which the compiler sees: it leaves no loop.
    first = tl.program_id(0)
    turns = first + 1 if ONE_TILE else tiles_m * tiles_n
    for turn in tl.range(first, turns, 1 if ONE_TILE else tl.num_programs(0), flatten=not ONE_TILE):
        tile = turn // SPLIT_K
        first_step = turn % SPLIT_K * steps
        # Within a group the tile's row varies fastest; the last group may have fewer rows.
        group = tile // (GROUP_M * tiles_n)
        within = tile % (GROUP_M * tiles_n)
        group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
        tile_m = group * GROUP_M + within % group_rows
        tile_n = within // group_rows
        first_row, first_col = (tile_m * BLOCK_M).to(tl.int32), (tile_n * BLOCK_N).to(tl.int32)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(steps):
            first_k = (first_step + step) * BLOCK_K
            a_tile = a_desc.load([first_k, first_row]).T if A_COL else a_desc.load([first_row, first_k])
            b_tile = b_desc.load([first_col, first_k]).T if B_COL else b_desc.load([first_k, first_col])
            total = tl.dot(a_tile, b_tile, total)
        if SPLIT_K == 1:
            _store(total, out, out_desc, M, N, tile_m, tile_n)
        else:
            place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            parts = sums + tile.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N) + place
            tl.store(parts + turn % SPLIT_K * (BLOCK_M * BLOCK_N), total)
            # For all threads' stores, before one thread takes the ticket. The ticket is release and acquire in one: the
            # holder of a tile's last ticket may read what the others have written, from L2 (.cg).
            tl.debug_barrier()
            ticket = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu")
            if ticket == SPLIT_K - 1:
                total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                for part in range(SPLIT_K):
                    total += tl.load(parts + part * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
                _store(total, out, out_desc, M, N, tile_m, tile_n)
                tl.store(tickets + tile, 0)


@dataclass(frozen=True, slots=True)
class Plan:
    """An entry of the launch cache, for calls that differ in values and in equally aligned addresses alone."""

    kernel: CompiledKernel
    grid: tuple[int, int, int]
    repack_a: bool
    repack_b: bool
    descriptors: tuple[TensorDescriptor | None, ...]  # of a, b and the outputs; they hold no tensors
    sums: int  # elements of the workspace; 0 where no tile is split
    arguments: tuple[Any, ...]  # those after tickets


_plans: dict[tuple[Any, ...], Plan] = {}


def matmul_bf16_v17_prologue(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out = a @ b; a: [M, K], b: [K, N], any strides, both bf16 or fp16; out: [M, N], row-major, the same or fp32."""
    aligned = a.data_ptr() % 16 == 0, b.data_ptr() % 16 == 0, out.data_ptr() % 16 == 0
    key = a.shape, a.stride(), b.shape, b.stride(), a.dtype, out.dtype, aligned, a.get_device()
    plan = _plans.get(key)
    if plan is None or tuning.is_recording():
        plan = _first(a, b, out)
        if plan is not None:
            if len(_plans) == PLANS:
                _plans.clear()
            _plans[key] = plan
        return
    replay(plan, (a, b, out), (out,))


def _first(a: Tensor, b: Tensor, out: Tensor) -> Plan | None:
    """Run a product that is not in the launch cache, and make its plan, unless it is empty, interpreted or captured."""
    (M, K), N = a.shape, b.shape[1]
    if min(M, N, K) == 0:  # a flattened loop takes at least one step, so K = 0 is not for it
        out.zero_()
        return None
    if max(M, N, K) >= LARGEST_SIZE:
        raise ValueError(
            f"a is {M} x {K} and b {K} x {N}, all sizes must be below {LARGEST_SIZE} for this step: call it on slices"
        )
    repack_a, repack_b = (layout_of(x) == "pointers" for x in (a, b))
    a, b = repacked(a) if repack_a else a, repacked(b) if repack_b else b
    a_layout, b_layout, out_layout = layout_of(a), layout_of(b), stored_as(out)
    variant = tuning.layouts(a=a_layout, b=b_layout, store=out_layout)
    if out.dtype != a.dtype:
        variant["out"] = "fp32"
    problem = tuning.problem_of(M, N, K, dtype=a.dtype, **variant)
    kernel, config = tuning.choose(matmul_bf16_v17_prologue_kernel, "matmul_bf16/v17_prologue", problem, a.device)
    constants = {
        "A_COL": a_layout == "col", "B_COL": b_layout == "col", "OUT_DESCRIBED": out_layout == "row",
        "EARLY": not triton.knobs.runtime.interpret,  # which never has two kernels under way
    }  # fmt: skip
    sizes = M, N, K
    if not config:
        timed = worth_timing(kernel.configs, {"M": M, "N": N, "K": K, "out": out})
        most = max(sums_of(M, N, each.kwargs) for each in timed)
        grid = lambda config: grid_of(M, N, config, a.device)  # noqa: E731
        launch(kernel, grid, (*_describe(a, b, out, timed[0].kwargs), out), most, sizes, constants)
        kernel, config = kernel.fn, kernel.best_config.all_kwargs()
    if tiles_of(M, N, config) > COUNTERS:  # possible for the winner of a near problem
        config = config | {"SPLIT_K": 1}
    grid, sums, descriptors = grid_of(M, N, config, a.device), sums_of(M, N, config), _describe(a, b, out, config)  # type: ignore[assignment]
    constants |= config  # type: ignore[arg-type]
    compiled = launch(kernel, grid, (*descriptors, out), sums, sizes, constants)
    return planned(compiled, grid, (repack_a, repack_b), descriptors, sums, sizes, constants, a.device)  # type: ignore[arg-type]


def launch(
    kernel: Any, grid: Any, arguments: tuple[Any, ...], sums: int, sizes: tuple[int, int, int], constants: Any
) -> Any:
    """Launch a kernel that takes descriptors and tensors, then a workspace, tickets and the sizes."""
    device = next(each for each in arguments if isinstance(each, Tensor)).device
    early = {"launch_pdl": True} if constants["EARLY"] else {}
    return kernel[grid](*arguments, *_workspace(sums, device), *sizes, **constants, **early)


def _workspace(sums: int, device: torch.device) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The workspace for the partial sums of split tiles, and their tickets."""
    return (torch.empty(sums, dtype=torch.float32, device=device), counter(device)) if sums else (None, None)


def replay(plan: Plan, described: tuple[Tensor | None, ...], arguments: tuple[Tensor | None, ...]) -> None:
    """Launch a plan. ``described``: a, b and the outputs, which the kernel gets as descriptors; then its tensors."""
    a, b, *written = described
    a, b = repacked(a) if plan.repack_a else a, repacked(b) if plan.repack_b else b  # type: ignore[arg-type]
    descriptors = map(moved, plan.descriptors, (a, b, *written))
    plan.kernel[plan.grid](*descriptors, *arguments, *_workspace(plan.sums, a.device), *plan.arguments)  # type: ignore[union-attr]


def planned(
    compiled: Any,
    grid: tuple[int, int, int],
    repack: tuple[bool, bool],
    descriptors: tuple[TensorDescriptor | None, ...],
    sums: int,
    sizes: tuple[int, int, int],
    constants: dict[str, Any],
    device: torch.device,
) -> Plan | None:
    """The launch as a plan for later calls; None in the interpreter, and under capture, where the choice is a stopgap.

    A plan keeps no tensor of its first call.
    """
    if not isinstance(compiled, CompiledKernel) or torch.cuda.is_current_stream_capturing():
        return None
    constants = constants | {"ONE_TILE": has_one_tile(*sizes[:2], constants, device)}
    named = tuple(constants[name] for name in compiled.src.fn.arg_names if name in constants)
    without_tensors = tuple(moved(each, None) for each in descriptors)
    return Plan(compiled, grid, *repack, without_tensors, sums, (*sizes, *named))


def _describe(a: Tensor, b: Tensor, out: Tensor, config: dict[str, Any]) -> tuple[TensorDescriptor | None, ...]:
    a_block, b_block, out_block = blocks_of(config, out)
    return described(a, a_block), described(b, b_block), described(out, out_block) if stored_as(out) == "row" else None


def stored_as(out: Tensor) -> Layout:
    """How a row-major matrix is stored: by a descriptor of its rows, or by pointers. A single column may look "col"."""
    return "row" if layout_of(out) == "row" else "pointers"


def blocks_of(config: dict[str, Any], out: Tensor) -> tuple[list[int], list[int], list[int]]:
    """The blocks that descriptors of a, b and out move at a time, rows first."""
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    return [m, k], [k, n], [m, n // (4 if out.dtype == torch.float32 else 2)]


def described(matrix: Tensor, block: list[int]) -> TensorDescriptor | None:
    """The descriptor by which the copy engine moves blocks of a matrix, given rows first; None if it cannot."""
    layout = layout_of(matrix)
    if layout == "pointers":
        return None
    if layout == "col":
        matrix, block = matrix.t(), block[::-1]
    return TensorDescriptor.from_tensor(matrix, block)


def moved(descriptor: TensorDescriptor | None, matrix: Tensor | None) -> TensorDescriptor | None:
    """The same descriptor of another matrix, without the checks of a new one, which take half of its time."""
    if descriptor is None:
        return None
    another = object.__new__(TensorDescriptor)
    another.__dict__ = descriptor.__dict__ | {"base": matrix}
    return another


def has_one_tile(M: int, N: int, config: dict[str, Any], device: torch.device) -> bool:
    """Whether each program computes one tile, or a part of one."""
    return config["SPLIT_K"] > 1 or grid_of(M, N, config, device)[0] == tiles_of(M, N, config)
