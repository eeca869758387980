"""The kernels whose stages are recorded, and the settings that turn one of the compiler's passes off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kernel_twins import OPS
from kernel_twins.spec import Case, Op, Step


@dataclass(frozen=True, slots=True)
class Setting:
    """A Triton kernel compiled otherwise than its launcher asks; the default changes nothing.

    ``off`` is the named pass (evidence.py) that finds nothing to do. ``constants``, ``types`` and ``options`` replace
    constexprs, types of arguments and compile options. ``loose`` arguments are no longer known to be multiples of 16.
    """

    name: str = ""
    told: str = "as launched"
    off: str = ""
    constants: Mapping[str, object] = field(default_factory=dict)
    types: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)
    loose: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kernel:
    """A step whose stages are recorded; ``cuda`` picks the CUDA twin's instantiation by a part of its symbol."""

    op_name: str
    number: str
    cuda: str = ""
    settings: tuple[Setting, ...] = ()

    @property
    def op(self) -> Op:
        return OPS[self.op_name]

    @property
    def step(self) -> Step:
        return next(step for step in self.op.steps if step.name.startswith(self.number))

    @property
    def case(self) -> Case:
        return self.op.profile_case_of(self.step, "triton") or self.op.profile_case


_BF16 = "__nv_bfloat16"
_UNALIGNED = "addresses and sizes are not known to be multiples of 16"

KERNELS = (
    Kernel("vector_add", "v01", "IfE"),
    Kernel(
        "vector_add",
        "v03",
        "IfE",
        (
            Setting("unaligned", _UNALIGNED, "vectorization", loose=("a", "b", "out", "n")),
            Setting("one-element", "BLOCK is one element a thread", "coalescing", constants={"BLOCK": 128}),
        ),
    ),
    Kernel("vector_add", "v06", "IfE"),
    Kernel(
        "reduction",
        "v04",
        "IfE",
        (
            Setting("unaligned", _UNALIGNED, "vectorization", loose=("x", "n")),
            Setting(
                "one-warp",
                "one warp a program, which sums by shuffles alone",
                "shared memory",
                constants={"BLOCK": 512},
                options={"num_warps": 1},
            ),
        ),
    ),
    Kernel("matmul_bf16", "v01", _BF16),
    Kernel("matmul_bf16", "v02", f"{_BF16}Lb1ELb1E"),
    Kernel(
        "matmul_bf16",
        "v04",
        f"{_BF16}Lb1ELb1E",
        (
            Setting(
                "strides",
                "strides are not known to be multiples of 16",
                "vectorization",
                loose=("stride_am", "stride_bk"),
            ),
            Setting("block-m-32", "BLOCK_M is 32", "tensor cores", constants={"BLOCK_M": 32}),
            Setting("one-stage", "one stage: nothing is fetched ahead", options={"num_stages": 1}),
            Setting(
                "fp32",
                "fp32 without TF32, tiles of 64 x 64 x 16",
                "swizzle",
                constants={"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 16},
                types={"a": "*fp32", "b": "*fp32", "out": "*fp32"},
                options={"allowed_dot_input_precisions": ("ieee",)},
            ),
        ),
    ),
    Kernel("matmul_bf16", "v07", f"{_BF16}Lb1ELb1E"),
    Kernel("matmul_bf16", "v11", f"{_BF16}Lb1ELb1E"),
    Kernel("matmul_bf16", "v16"),
    Kernel("linear", "v01", f"13{_BF16}Xtl5ShapeLi128ELi128ELi1ELb1ELb1EEELb1E"),
    Kernel("softmax", "v02", _BF16),
    Kernel(
        "softmax",
        "v03",
        f"{_BF16}Li256ELi32E",
        (
            Setting(
                "unaligned",
                "N and the row's stride are not known to be multiples of 16",
                "vectorization",
                loose=("N", "stride_xm"),
            ),
        ),
    ),
    Kernel("rms_norm", "v01", _BF16),
    Kernel("attention", "v04", f"{_BF16}Li128ELb1E"),
)
