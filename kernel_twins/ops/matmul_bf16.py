"""``out = a @ b`` for bf16 or fp16 operands, accumulated in fp32: the tensor cores' own product."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_twins import matmul
from kernel_twins.spec import Case, Op, Prediction, Step

if TYPE_CHECKING:
    from torch import Tensor

_LAYOUT_GAP = "Triton's compiler swizzles shared memory and picks the instruction that reads it by itself."
_TUNING_GAP = "The constants of v05_grouped were chosen by the same search, by hand."


def torch_mm(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    import torch

    torch.mm(a, b, out=out)


OP = Op(
    name="matmul_bf16",
    chapter=5,
    title="Matmul, bf16",
    summary="`out = a @ b` for bf16 or fp16 with fp32 sums. The ladder is about keeping the tensor cores fed.",
    inputs=matmul.inputs,
    outputs=matmul.outputs,
    reference=matmul.reference,
    check=matmul.check_of("bf16", "fp16"),
    accepts=matmul.accepts_of("bf16", "fp16"),
    test_cases=matmul.test_cases("bf16", "fp16"),
    bench_cases=tuple(
        Case.of(m, n, k, dtype=dtype, **variant)
        for m, n, k, dtype, variant in (
            (1_024, 1_024, 1_024, "bf16", {}),
            (2_048, 2_048, 2_048, "bf16", {}),
            (4_096, 4_096, 4_096, "bf16", {}),
            (8_192, 8_192, 8_192, "bf16", {}),
            (4_096, 4_096, 4_096, "bf16", {"b": "col"}),
            (8_192, 8_192, 8_192, "bf16", {"b": "col"}),
            (4_096, 4_096, 4_096, "fp16", {}),
            (4_095, 4_097, 4_096, "bf16", {}),
            (3_333, 5_555, 7_777, "bf16", {}),
        )
    ),
    headline_cases=(
        Case.of(4_096, 4_096, 4_096, dtype="bf16"),
        Case.of(8_192, 8_192, 8_192, dtype="bf16"),
        Case.of(4_096, 4_096, 4_096, dtype="fp16"),
        Case.of(4_095, 4_097, 4_096, dtype="bf16"),
    ),
    profile_case=Case.of(4_096, 4_096, 4_096, dtype="bf16"),
    ceiling="bf16",
    flops=matmul.flops,
    bytes=matmul.bytes_moved,
    baselines={"torch": torch_mm},
    steps=(
        Step(
            name="v01_naive",
            change="One element at a time, no tensor cores.",
            why="The formula as it is written, with the lanes along the columns so that loads are coalesced. The "
            "tensor cores, which hold nearly all of this chip's arithmetic, stay idle.",
            predictions=(
                Prediction("tensor_pipe", "<=", 0.1),
                Prediction("ceiling_share", "<=", 2),
            ),
        ),
        Step(
            name="v02_tensor_cores",
            change="Tiles of A and B in shared memory are multiplied by the tensor cores.",
            why="One mma.sync of a warp does 2048 multiply-adds, and each tile fetched serves the whole block. Nothing "
            "is fetched ahead, so the tensor cores wait for every tile; in CUDA, plainly stored tiles have bank "
            "conflicts besides.",
            predictions=(
                Prediction("time", "<=", 0.05, relative=True),
                Prediction("tensor_pipe", "<=", 50),
                Prediction("bank_conflicts", ">=", 20, backends=("cuda",)),
            ),
        ),
        Step(
            name="v03_swizzled",
            change="ldmatrix reads whole fragments, from tiles whose 16-byte pieces are permuted by XOR.",
            why="One ldmatrix brings four 8 x 8 matrices where 32-bit loads took four instructions or more. Its eight "
            "rows would lie in the same banks; the XOR of the piece's column with its row spreads them over all.",
            predictions=(
                Prediction("bank_conflicts", "<=", 3),
                Prediction("time", "<=", 0.75, relative=True),
            ),
            backends=("cuda",),
            gap=_LAYOUT_GAP,
        ),
        Step(
            name="v04_pipelined",
            change="Tiles arrive by cp.async several stages ahead.",
            why="While the tensor cores work on one tile, the next ones are on their way without holding registers, "
            "and one barrier a tile remains.",
            predictions=(
                Prediction("time", "<=", 0.7, relative=True),
                Prediction("tensor_pipe", ">=", 45),
            ),
        ),
        Step(
            name="v05_grouped",
            change="Blocks are numbered so that neighbours share rows and columns of tiles.",
            why="Blocks that run together should touch a near-square patch of the output and find their operands in "
            "L2. At 4096 x 4096 one wave covers eight whole rows of tiles as it is, so little should move here; it is "
            "kept for larger products.",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.04),
                Prediction("dram_bytes", "==", 1.0, relative=True, tolerance=0.15),
            ),
        ),
        Step(
            name="v06_autotuned",
            change="Tile shape, warps and stages are searched; tiles come by tensor descriptors and blocks persist.",
            why="A tile of 128 x 256 keeps the tensor cores busy longer per byte fetched, and the copy engine fetches "
            "across the borders of tiles without the threads' help.",
            predictions=(
                Prediction("time", "<=", 0.85, relative=True),
                Prediction("tensor_pipe", ">=", 70),
            ),
            backends=("triton",),
            gap=_TUNING_GAP,
        ),
    ),
)
