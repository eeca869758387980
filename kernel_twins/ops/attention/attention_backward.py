"""``dq``, ``dk`` and ``dv`` of attention, from what the forward pass saved; sums in fp32."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kernel_twins.ops import ptx
from kernel_twins.ops.attention import backward_baselines, shared
from kernel_twins.ops.attention.backward_reference import description, deviation, exemplar
from kernel_twins.spec import ITEMSIZE, Case, Op, Output, Prediction, Step

if TYPE_CHECKING:
    from torch import Generator, Tensor

_GLUON = (ptx.WGMMA_FROM_REGISTERS, ptx.TMA_LOAD, ptx.BARRIER_WAIT, ptx.MORE_REGISTERS)
_TRANSPOSED_GAP = "tl.dot takes its operands from where the compiler puts them."
_SCHEDULED_GAP = "No such step has been written in Gluon."
_DETERMINISTIC_GAP = "Triton's v02 sums dq in one order already, in a kernel of its own."

_FULL = Case.of(2, 16, 8_192, 128, dtype="bf16")
_CAUSAL = _FULL.but(mask="causal")
_NARROW = Case.of(2, 32, 8_192, 64, dtype="bf16")


def _test_cases() -> tuple[Case, ...]:
    """One query and one key, borders of tiles and their neighbours, every kind of band, of heads and of layout.

    Those of wide heads, a softcap, packed sequences and deterministic sums are for the last step.
    """
    sizes: tuple[tuple[int, int, int, int, dict[str, str]], ...] = (
        (1, 1, 1, 64, {}),
        (2, 3, 64, 64, {}),
        (1, 2, 128, 128, {}),
        (2, 2, 129, 128, {"keys": "1"}),
        (1, 2, 1, 128, {"keys": "257"}),
        (2, 1, 63, 64, {"keys": "65"}),
        (1, 2, 200, 40, {"keys": "131"}),
        (1, 3, 67, 8, {"keys": "190"}),
        (1, 1, 300, 120, {"keys": "300"}),
        (1, 2, 0, 64, {"keys": "5"}),
        (2, 2, 70, 64, {"keys": "0"}),
        (0, 2, 7, 64, {}),
        (1, 2, 193, 128, {"mask": "causal"}),
        (2, 2, 130, 64, {"mask": "causal", "keys": "259"}),
        (1, 2, 259, 64, {"mask": "causal", "keys": "130"}),  # the first queries see no key
        (1, 2, 384, 128, {"mask": "causal", "keys": "447"}),
        (1, 2, 259, 128, {"mask": "top", "keys": "130"}),
        (1, 2, 130, 128, {"mask": "top", "keys": "259"}),  # the last keys are seen by no query
        (1, 2, 320, 64, {"window": "64_0"}),
        (1, 2, 257, 128, {"window": "3_70", "keys": "300"}),
        (1, 1, 200, 64, {"window": "0_0", "keys": "100"}),
        (1, 4, 100, 64, {"kv": "1"}),
        (2, 6, 150, 128, {"kv": "2", "mask": "causal"}),
        (1, 2, 150, 64, {"scale": "neg"}),
        (1, 2, 150, 128, {"scale": "neg", "mask": "causal"}),
        (1, 2, 150, 64, {"scale": "small"}),
        (1, 2, 150, 64, {"dlse": "yes"}),
        (2, 4, 140, 128, {"dlse": "yes", "kv": "2", "mask": "causal"}),
        (2, 2, 140, 64, {"dout": "expanded"}),
        (2, 3, 140, 128, {"layout": "bshd", "mask": "causal"}),
        (2, 2, 77, 64, {"layout": "pitched"}),
        (2, 2, 77, 64, {"offset": "1"}),
        (1, 140, 200, 64, {"keys": "330"}),
        (2, 70, 330, 128, {"keys": "200", "mask": "causal"}),
        (1, 2, 70, 136, {"keys": "90"}),
        (2, 1, 150, 192, {"keys": "81", "dlse": "yes"}),
        (1, 2, 200, 256, {"mask": "causal", "keys": "333"}),
        (2, 2, 129, 256, {"window": "40_9", "kv": "1", "layout": "bshd"}),
        (1, 2, 150, 256, {"scale": "neg"}),
        (1, 2, 200, 64, {"cap": "2"}),
        (1, 2, 130, 128, {"cap": "0.5", "mask": "causal", "scale": "neg"}),
        (2, 4, 150, 192, {"cap": "1000", "keys": "81", "kv": "2"}),
        (7, 2, 140, 64, {"packed": "yes"}),
        (9, 4, 400, 128, {"packed": "yes", "mask": "causal", "kv": "2"}),
        (6, 2, 300, 128, {"packed": "yes", "keys": "170", "mask": "causal"}),
        (5, 2, 90, 256, {"packed": "yes", "keys": "210", "mask": "top"}),
        (6, 1, 350, 64, {"packed": "yes", "window": "30_5", "cap": "3", "scale": "neg"}),
        (40, 8, 260, 128, {"packed": "yes", "mask": "causal"}),
        (2, 70, 330, 128, {"deterministic": "yes", "mask": "causal"}),
        (7, 2, 300, 256, {"deterministic": "yes", "packed": "yes", "cap": "3"}),
    )
    return tuple(
        Case.of(b, h, s, d, dtype=dtype, **variant) for dtype in ("bf16", "fp16") for b, h, s, d, variant in sizes
    )


def _inputs(case: Case, generator: Generator) -> tuple[Tensor, ...]:
    """dout: as q, and q, k and v as the forward pass has them, with its result and the logarithms of its rows' sums.

    ``dlse.yes`` adds these logarithms' gradients, fp32 [B, H, Sq], which packed sequences always have, as their starts
    come behind. NaN follows the last sequence's queries, too. With ``dout.expanded`` one row is seen as all rows of
    dout. Where hostile, dout grows with the result, so that a row's sum of products is large.
    """
    import torch
    from torch.nn.functional import pad

    from kernel_twins.ops.attention import reference
    from kernel_twins.ops.tensors import normal

    q, k, v, *starts = shared.inputs(case, generator)
    result, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if q.numel():
        result.copy_(reference.reference(case, (q, k, v), slice(None))[0])
        lse.copy_(reference.lse_reference(case, (q, k, v), slice(None))[0])
    if case.get("dout") == "expanded":
        dout = normal(case.but(values=""), (1, 1, 1, q.shape[3]), generator).expand(q.shape)
    else:
        dout, *_ = shared.inputs(case.but(values="", scale=""), generator)
        if case.get("values") == "hostile":
            dout += result
    if not (case.get("dlse") or starts):
        return dout, q, k, v, result, lse
    dlse = torch.randn(lse.shape, generator=generator, device=generator.device)
    if starts:
        tokens, behind = (0, 0, 0, 0, 0, shared.PADDING), (0, shared.PADDING)
        packed = (pad(each.transpose(1, 2), tokens, value=math.nan) for each in (dout, q, result))
        dout, q, result = (each.transpose(1, 2) for each in packed)
        lse, dlse = pad(lse, behind, value=-math.inf), pad(dlse, behind, value=math.nan)
    return dout, q, k, v, result, lse, dlse, *starts


def _outputs(case: Case) -> tuple[Output, ...]:
    """dq, dk and dv; 0 at tokens in no sequence."""
    b, h, queries, d = case.shape
    keys = shared.keys_of(case)
    if case.get("packed"):
        b, queries, keys = 1, *(sum(each) + shared.PADDING for each in zip(*shared.lengths_of(case), strict=True))
    of_keys = Output((b, shared.kv_heads_of(case), keys, d), case.dtype)
    return Output((b, h, queries, d), case.dtype), of_keys, of_keys


def _options(case: Case) -> dict[str, Any]:
    return shared.options(case) | ({"deterministic": True} if case.get("deterministic") else {})


def _check(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    result: Tensor,
    lse: Tensor,
    dlse: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    out: tuple[Tensor | None, Tensor | None, Tensor | None],
    scale: float | None = None,
    band: shared.Band | None = None,
    softcap: float | None = None,
    from_end: bool = False,
    deterministic: bool = False,
) -> None:
    """dout, q, result: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], rows of D neighbours; lse, dlse: fp32 [B, H, Sq].

    result and lse are what the forward pass gave, which had the same scale, band, softcap, from_end, cu_seqlens_q and
    cu_seqlens_k; without dlse its gradient is 0. out: dq, dk and dv, 0 where a token is in no sequence, or None for one
    that is not wanted. ``deterministic`` asks for the same bits of dq in every call, which dk and dv have anyway.
    """
    from kernel_twins.ops import tensors

    operands = {"q": q, "dout": dout, "k": k, "v": v, "result": result}
    shared.require_rows(operands)
    shared.require_softcap(softcap)
    shared.require_sequences(q, cu_seqlens_q, cu_seqlens_k)
    shared.require_heads(q, k, v, shared.LARGEST_D)
    for name in ("dout", "result"):
        tensors.require_shape(name, operands[name], tuple(q.shape), "it has a row for each of q's")
    rows = {"lse": lse} | ({} if dlse is None else {"dlse": dlse})
    for name, numbers in rows.items():
        tensors.require_dtype(name, numbers, "fp32")
        tensors.require_shape(name, numbers, tuple(q.shape[:3]), "it has a number for each query")
        tensors.require_device(name, numbers, "q", q)
        tensors.require_contiguous(name, numbers)
    operands |= rows
    if not isinstance(out, tuple):
        raise TypeError(f"out is a {type(out).__name__}, must be a tuple of 3 tensors: dq, dk, dv")
    if len(out) != 3:
        raise ValueError(f"out has {len(out)} tensors, must have 3: dq, dk, dv")
    for index, (tensor, of) in enumerate(zip(out, ("q", "k", "v"), strict=True)):
        name = f"out[{index}]"
        if tensor is None:
            continue
        tensors.require_tensor(name, tensor)
        tensors.require_same_dtype(name, tensor, of, operands[of])
        tensors.require_shape(name, tensor, tuple(operands[of].shape), f"it is the gradient of {of}")
        tensors.require_device(name, tensor, "q", q)
        tensors.require_contiguous(name, tensor)
        for other, operand in operands.items():
            tensors.require_apart(tensor, other, operand)
        for before in out[:index]:
            if before is not None:
                tensors.require_apart(before, name, tensor)


def _bytes(case: Case) -> int:
    """dout, q, k, v, the result and lse are read, and three gradients written."""
    _, h, _, d = case.shape
    lengths = shared.lengths_of(case)
    queries, keys = sum(each for each, _ in lengths), sum(each for _, each in lengths)
    return (4 * h * queries + 4 * shared.kv_heads_of(case) * keys) * d * ITEMSIZE[case.dtype] + h * queries * 4


_SHAPES = shared.shapes(128, 64)
_HEADLINES = tuple(case for case in _SHAPES if case.shape[2] in (2_048, 8_192))
_BENCH_CASES = tuple(case for case in _HEADLINES if case.shape[2] == 8_192)

OP = Op(
    name="attention_backward",
    family="attention",
    chapter=19,
    title="Attention, backward",
    summary="`dv = p^T dout`, `ds = p * (dout v^T - delta)`, `dq = scale ds k`, `dk = scale ds^T q`: five products of "
    "tiles, as the scores are computed anew. A tile adds to gradients of queries and to gradients of keys, and no "
    "block has both.",
    rounds="Exponentials and the scores' gradients are rounded to the dtype before they are multiplied.",
    deviation=deviation(0),
    more_deviations=(deviation(1), deviation(2)),
    inputs=_inputs,
    hostile=True,
    outputs=_outputs,
    reference=description(0),
    more_references=(description(1), description(2)),
    check=_check,
    accepts=shared.accepts,
    options=_options,
    test_cases=_test_cases(),
    bench_cases=_BENCH_CASES,
    wide_cases=tuple(case for case in _SHAPES if case not in _BENCH_CASES),
    headline_cases=_HEADLINES,
    size_axis=shared.SIZE_AXIS,
    profile_case=_FULL,
    ceiling="bf16",
    flops=lambda case: 10 * case.shape[1] * shared.seen(case) * case.shape[3],  # five products of 2 D for each pair
    bytes=_bytes,
    baselines={
        "torch": backward_baselines.flash,
        "cudnn": backward_baselines.cudnn,
        "flash4": backward_baselines.flash4,
        "compile": backward_baselines.flex,
    },
    differs=backward_baselines.differs,
    exemplar=exemplar,
    behind={"cuda": ("v10_dispatch",), "triton": ("v10_dispatch",)},
    steps=(
        Step(
            name="v01_two_kernels",
            predictions=(
                Prediction("tensor_pipe", ">=", 15),
                Prediction("ceiling_share", "<=", 40),
                Prediction("bank_conflicts", "<=", 3, backends=("cuda",)),
            ),
            accepts=shared.plain,
            launches=3,
            helpers=("attention_backward_delta_kernel",),
            promises={80: (ptx.MMA,), 90: (ptx.WGMMA_FROM_REGISTERS,)},
        ),
        Step(
            name="v02_tma",
            predictions=(
                Prediction("time", "<=", 0.5, relative=True, backends=("cuda",)),
                Prediction("tensor_pipe", ">=", 55, backends=("cuda",)),
                Prediction("time", "<=", 1.0, relative=True, backends=("triton",)),
            ),
            arch="==9.0a",
            accepts=shared.plain_copyable,
            launches=3,
            helpers=("attention_backward_delta_kernel",),
            promises={90: (ptx.WGMMA_FROM_REGISTERS, ptx.TMA_LOAD)},
        ),
        Step(
            name="v03_one_pass",
            predictions=(
                Prediction("time", "==", 0.97, relative=True, tolerance=0.05, backends=("cuda",)),
                Prediction("instructions", "<=", 0.85, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 1.1, relative=True, backends=("triton",)),
            ),
            arch="==9.0a",
            accepts=shared.plain_copyable,
            launches=3,
            helpers=("attention_backward_delta_kernel", "attention_backward_rounding_kernel"),
            deterministic=False,
            promises={90: (ptx.WGMMA_FROM_REGISTERS, ptx.TMA_LOAD)},
        ),
        Step(
            name="v04_transposed",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.03),
                Prediction("bank_conflicts", "<=", 3),
            ),
            no_triton=_TRANSPOSED_GAP,
            arch="==9.0a",
            accepts=shared.plain_copyable,
            launches=3,
            helpers=("attention_backward_delta_kernel",),
            deterministic=False,
        ),
        Step(
            name="v05_warp_specialized",
            predictions=(
                Prediction("time", "<=", 0.88, relative=True, backends=("cuda",)),
                Prediction("tensor_pipe", ">=", 60, backends=("cuda",)),
                Prediction("time", "<=", 0.8, relative=True, backends=("triton",)),
                Prediction("tensor_pipe", ">=", 50, backends=("triton",)),
            ),
            arch="==9.0a",
            accepts=shared.plain_copyable,
            launches=3,
            helpers=("attention_backward_delta_kernel", "attention_backward_rounding_kernel"),
            deterministic=False,
            promises={90: (*_GLUON, ptx.TMA_ADD)},
        ),
        Step(
            name="v06_overlapped",
            predictions=(
                Prediction("time", "<=", 0.95, relative=True, backends=("cuda",)),
                Prediction("time", "==", 0.97, relative=True, tolerance=0.03, backends=("triton",)),
                Prediction("instructions", "==", 1.0, relative=True, tolerance=0.03),
            ),
            arch="==9.0a",
            accepts=shared.plain_copyable,
            launches=3,
            helpers=("attention_backward_delta_kernel", "attention_backward_rounding_kernel"),
            deterministic=False,
            promises={90: (*_GLUON, ptx.TMA_ADD)},
        ),
        Step(
            name="v07_register_reduction",
            predictions=(
                Prediction("time", "==", 0.97, relative=True, tolerance=0.02, backends=("cuda",)),
                Prediction("time", "==", 0.955, relative=True, tolerance=0.02, case=_CAUSAL, backends=("cuda",)),
                Prediction("time", "==", 1.02, relative=True, tolerance=0.03, backends=("triton",)),
                Prediction("instructions", "<=", 1.0, relative=True),
            ),
            arch="==9.0a",
            accepts=shared.plain_copyable,
            launches=3,
            helpers=(
                "attention_backward_delta_kernel",
                "attention_backward_v07_register_reduction_rounding_kernel",
            ),
            deterministic=False,
            promises={90: (*_GLUON, ptx.ATOMIC_ADD_4)},
        ),
        Step(
            name="v08_scheduled",
            predictions=(
                Prediction("time", "==", 1.02, relative=True, tolerance=0.02),
                Prediction("time", "==", 0.96, relative=True, tolerance=0.02, case=_CAUSAL),
            ),
            no_triton=_SCHEDULED_GAP,
            arch="==9.0a",
            accepts=shared.plain_copyable,
            launches=3,
            helpers=("attention_backward_delta_kernel",),
            deterministic=False,
        ),
        Step(
            name="v09_deterministic",
            predictions=(
                Prediction("time", "==", 1.05, relative=True, tolerance=0.04),
                Prediction("time", "==", 1.08, relative=True, tolerance=0.04, case=_CAUSAL),
            ),
            no_triton=_DETERMINISTIC_GAP,
            arch="==9.0a",
            accepts=shared.plain_copyable,
            launches=3,
            helpers=("attention_backward_delta_kernel",),
        ),
        Step(
            name="v10_dispatch",
            predictions=(
                Prediction("time", "==", 0.97, relative=True, tolerance=0.03, backends=("cuda",)),
                Prediction("time", "<=", 0.9, relative=True, case=_NARROW, backends=("cuda",)),
                Prediction("time", "==", 0.98, relative=True, tolerance=0.03, case=_FULL, backends=("triton",)),
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02, case=_NARROW, backends=("triton",)),
            ),
            arch="==9.0a",
            accepts=shared.copyable,
            launches=3,
            helpers=(
                "attention_backward_delta_kernel",
                "attention_backward_v10_dispatch_delta_kernel",
                "attention_backward_rounding_kernel",
                "attention_backward_v07_register_reduction_rounding_kernel",
            ),
            profile_case={"triton": None},
            deterministic=False,
            wide=True,
            promises={90: (ptx.WGMMA_FROM_REGISTERS, ptx.TMA_LOAD)},
        ),
    ),
)
