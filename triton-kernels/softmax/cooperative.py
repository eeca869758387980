"""What softmax's and softmax_backward's cooperative steps share.

Configurations, how many programs are resident, how those of a group leave, and launches with their cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import Autotuner

from kernel_twins._triton.lib import plans, tuning
from kernel_twins._triton.lib.workspace import counter
from kernel_twins._triton.softmax.routes import VECTOR_BYTES, registers, resident

Division = Callable[[int, int, bool, dict[str, Any]], dict[str, int]]
"""The tiling of rows by their length, the bytes of an element, whether vectors can be loaded, and a configuration."""


class Cooperative(NamedTuple):
    """A step as it is launched."""

    kernel: Autotuner
    name: str  # such as softmax/v08_cooperative
    matrices: int  # that it reads
    divided: Division
    instead: Callable[..., None]  # the step for rows whose programs cannot all be resident


class Known(NamedTuple):
    """The plan of a launch, and whether its programs share rows, for which they need counters."""

    plan: plans.Plan
    shares: bool


def configurations(chosen: Iterable[tuple[int, int, int, int]]) -> list[triton.Config]:
    """Of TILE_BYTES, PER_SM, STAGES and warps; the registers of a thread leave room for PER_SM programs.

    With several STAGES, PER_SM persistent programs an SM loop over the rows, which travel ahead. With one stage, rows
    that are not split get a program each.
    """
    return [
        triton.Config(
            {"TILE_BYTES": size, "PER_SM": per_sm, "STAGES": stages}, num_warps=warps, maxnreg=registers(per_sm, warps)
        )
        for size, per_sm, stages, warps in chosen
    ]


def heuristics(divided: Division, first: str, names: Iterable[str]) -> dict[str, Any]:
    """The kernel's constants by name, for rows of its argument ``first``."""
    found: dict[str, Any] = {
        name: lambda args, name=name: divided(args["N"], args[first].element_size(), args["WIDE"], args)[name]
        for name in names
    }
    if not triton.knobs.runtime.interpret:
        found["launch_cooperative_grid"] = lambda args: args["PARTS"] > 1
    return found


def fitting(first: str, matrices: int) -> dict[str, Any]:
    """Has a search pass over configurations in which the programs of a row cannot all be resident."""

    def prune(configs: list[triton.Config], args: dict[str, Any], **meta: Any) -> list[triton.Config]:
        return [config for config in configs if _fits(args["N"], args[first], config.all_kwargs(), matrices)]

    return {"early_config_prune": prune}


def _fits(N: int, x: Tensor, config: dict[str, Any], matrices: int) -> bool:
    return triton.cdiv(N * x.element_size(), config["TILE_BYTES"]) <= _resident(config, matrices, x.device)


def _resident(config: dict[str, Any], matrices: int, device: torch.device) -> int:
    # A grid's configuration has the constants of the kernel, but not its warps.
    return resident(config["TILE_BYTES"], config["PER_SM"], config["STAGES"], matrices, device)


@triton.jit
def as_it_came(tile):
    # Defeats common subexpression elimination (CSE): the asm makes the tile look new, so the compiler converts its
    # elements to fp32 again instead of keeping them, which would take twice the registers.
    if tile.dtype.primitive_bitwidth == 16:
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tile.dtype, is_pure=False, pack=2)
    else:
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], tile.dtype, is_pure=False, pack=1)
    return tile


@triton.jit
def leave(words, counters, group, PARTS: tl.constexpr, SLOTS: tl.constexpr):
    # The barrier makes sure that all threads of this program have finished polling. The last program of the group to
    # leave resets words and ticket to 0.
    tl.debug_barrier()
    ticket = counters + 4 * tl.num_programs(0) + group
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == PARTS - 1:
        slot = tl.arange(0, 2 * SLOTS)
        tl.store(words + slot, tl.zeros_like(slot).to(tl.int64), mask=slot < 2 * PARTS)
        tl.store(ticket, 0)


def launch(
    step: Cooperative, known: dict[tuple[Any, ...], Known], inputs: tuple[Tensor, ...], out: Tensor, log: bool
) -> None:
    """Launch a plan that is known of rows like these, or run them and keep their plan."""
    aligned = plans.alignment(*inputs, out)
    strides = tuple(each.stride(0) for each in inputs)
    key = out.shape, strides, out.dtype, log, aligned, out.get_device()
    if (found := known.get(key)) and not tuning.is_recording():
        found.plan(*inputs, out, counter(out.device) if found.shares else None)
    elif out.numel() > 0 and (found := _first(step, inputs, out, log, all(aligned))):
        plans.keep(known, key, found)


def _first(step: Cooperative, inputs: tuple[Tensor, ...], out: Tensor, log: bool, aligned: bool) -> Known | None:
    """Run a problem without a plan and return its plan; None if it is another step's, interpreted or captured."""
    (M, N), itemsize, device = out.shape, out.element_size(), out.device
    kernel, config = tuning.choose(step.kernel, step.name, tuning.problem_of(M, N, dtype=out.dtype), device)
    configs = [config] if config else [each.all_kwargs() for each in step.kernel.configs]
    if not any(_fits(N, out, each, step.matrices) for each in configs):
        step.instead(*inputs, out=out, log=log)
        return None
    strides = tuple(each.stride(0) for each in inputs) if M > 1 else (N,) * len(inputs)
    wide = aligned and all((stride - N) % (VECTOR_BYTES // itemsize) == 0 for stride in strides)
    constants: dict[str, Any] = {"LOG": log, "WIDE": wide}

    def grid(config: dict[str, Any]) -> tuple[int, int, int]:
        """All resident programs, in groups of PARTS; or one program a tile if rows are not split."""
        tiles = triton.cdiv(M, config["ROWS"])
        if config["PARTS"] == 1 and config["STAGES"] == 1:
            return tiles, 1, 1
        # All groups take the same number of tiles, except in the last round, so that none ends a whole tile late.
        rounds = triton.cdiv(tiles, _resident(config, step.matrices, device) // config["PARTS"])
        return triton.cdiv(tiles, rounds) * config["PARTS"], 1, 1

    if not config:
        kernel[grid](*inputs, out, counter(device), M, N, *strides, **constants)
        kernel, config = kernel.fn, kernel.best_config.all_kwargs()
    shares = step.divided(N, itemsize, wide, config)["PARTS"] > 1
    tensors = *inputs, out, counter(device) if shares else None
    plan = plans.launch(kernel, grid, tensors, (M, N, *strides), constants | config)
    return None if plan is None else Known(plan, shares)
