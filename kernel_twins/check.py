"""Does a call compute its operation? The gate before every timing, and what the tests assert.

One accuracy rule for all operations (the first term is FlashAttention's)::

    error <= 2 * (PyTorch's error at the same dtype) + eps(output) * |ref| + 4 * eps(fp32) * sum|terms|

both errors against float64. The last term admits a plain fp32 loop: over random terms it errs by
0.24 eps * sum|terms| (standard deviation) and by up to 2.3 in 200,000 sums, whatever their length, while PyTorch may
split a sum and err far less. Products in TF32 or bf16 stay a hundred times outside.

Outputs are poisoned and guarded before the call and inputs compared with a copy after it, so that a stale value, a
missed tail, a write past the end and a changed input are all found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kernel_twins._load import Call, load_baseline
from kernel_twins.spec import Case, Op, Output
from kernel_twins.tensors import OUT_DTYPE

_GUARD = 256  # bytes before and behind every output; also keeps its address as aligned as torch's own
_POISON = 0xFF  # in every byte: NaN in each of our dtypes, and no place
_FP32_LOOP = 4  # times eps(fp32) * sum|terms|, see above
_CHUNK = 2**26  # output elements held in float64 at a time


@dataclass(frozen=True, slots=True)
class Verdict:
    """``ok``, or the ``reason`` why not.

    ``error`` is the largest absolute error of the first output, or of the one at fault; ``margin`` is the largest error
    over its bound, of any.
    """

    ok: bool
    reason: str = ""
    error: float = 0.0
    margin: float = 0.0


class GuardedOutput:
    """An output tensor full of NaN, in the middle of bytes that nobody may write."""

    def __init__(self, output: Output, device: torch.device, offset: int) -> None:
        dtype = OUT_DTYPE[output.dtype]
        start = _GUARD + offset * dtype.itemsize
        size = math.prod(output.shape) * dtype.itemsize
        self._bytes = torch.full((start + size + _GUARD,), _POISON, dtype=torch.uint8, device=device)
        self._before, self._behind = self._bytes[:start], self._bytes[start + size :]
        self.tensor = self._bytes[start : start + size].view(dtype).view(output.shape)

    def intact(self) -> bool:
        return bool((self._before == _POISON).all()) and bool((self._behind == _POISON).all())


def generator(case: Case, device: str | torch.device, seed: int = 0) -> torch.Generator:
    """The random numbers of one case: the same for every step and backend."""
    return torch.Generator(device=device).manual_seed(seed)


def check(op: Op, call: Call, case: Case, *, device: str = "cuda", seed: int = 0) -> Verdict:
    """Run ``call`` on one case and judge everything it did. Exceptions of the call pass through."""
    inputs = op.inputs(case, generator(case, device, seed))
    offset = int(case.get("offset", "0"))
    guarded = [GuardedOutput(output, inputs[0].device, offset) for output in op.outputs(case)]
    before = tuple(tensor.clone() for tensor in inputs)
    outputs = _results(op, call, case, inputs, tuple(each.tensor for each in guarded))
    if not all(each.intact() for each in guarded):
        return Verdict(False, "wrote outside its output")
    for index, (tensor, copy) in enumerate(zip(inputs, before, strict=True)):
        if not _same_bits(tensor, copy):
            return Verdict(False, f"changed its input {index}")
    for each, wanted in zip(outputs, op.outputs(case), strict=True):
        if (tuple(each.shape), each.dtype) != (wanted.shape, OUT_DTYPE[wanted.dtype]):
            shape, dtype = tuple(each.shape), each.dtype
            return Verdict(False, f"returned {shape} of {dtype}, must be {wanted.shape} of {OUT_DTYPE[wanted.dtype]}")
    return compare(op, case, inputs, outputs)


def check_baseline(op: Op, call: Call, case: Case, *, device: str = "cuda") -> Verdict:
    """The same of a baseline, whose random numbers are its own: at the case without any."""
    return check(op, call, op.settled(case), device=device)


def compare(op: Op, case: Case, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> Verdict:
    """Judge outputs against float64 and against PyTorch at the same dtype."""
    torch_call = op.exemplar or load_baseline(op.name, next(iter(op.baselines)))
    torch_outs = _results(op, torch_call, case, inputs, tuple(torch.empty_like(each) for each in outputs))
    references = (op.reference, *op.more_references)
    verdicts = []
    for index, (out, torch_out) in enumerate(zip(outputs, torch_outs, strict=True)):
        verdict = _judge(partial(references[index], case, inputs), out, torch_out)
        if not verdict.ok:
            of = f"out[{index}]: " if len(outputs) > 1 else ""
            return replace(verdict, reason=of + verdict.reason)
        verdicts.append(verdict)
    return Verdict(True, "", verdicts[0].error, max(verdict.margin for verdict in verdicts))


def _results(
    op: Op, call: Call, case: Case, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """What a call computed: ``outputs``, which it was given, or what it returned instead."""
    returned = call(*inputs, **op.options(case), out=outputs[0] if len(outputs) == 1 else outputs)
    if isinstance(returned, Tensor):
        return (returned,)
    return returned if isinstance(returned, tuple) else outputs


def _judge(reference: Callable[[slice], tuple[Tensor, Tensor]], out: Tensor, torch_out: Tensor) -> Verdict:
    """Of one output."""
    out, torch_out = (tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in (out, torch_out))
    if out.numel() == 0:
        return Verdict(True)

    if not out.is_floating_point():  # places, of which none is nearly right
        exact = reference(slice(0, out.shape[0]))[0]
        if bool((unlike := out != exact).any()):
            at = _first(unlike)
            place = _place(at, slice(0, out.shape[0]))
            return Verdict(False, f"{place} is {out[at].item()}, must be {exact[at].item()}")
        return Verdict(True)

    step = max(1, _CHUNK // max(1, out.numel() // out.shape[0]))
    chunks = [slice(start, min(start + step, out.shape[0])) for start in range(0, out.shape[0], step)]
    whole = reference(chunks[0]) if len(chunks) == 1 else None  # needed twice
    torch_error = max(_largest_error(torch_out[rows], (whole or reference(rows))[0]) for rows in chunks)
    epsilon, fp32_epsilon = torch.finfo(out.dtype).eps, torch.finfo(torch.float32).eps

    error = margin = 0.0
    for rows in chunks:
        exact, terms = whole or reference(rows)
        ours = out[rows]
        expected = exact.to(ours.dtype)
        special = ~expected.isfinite()
        unlike = special & ~((ours == expected) | (ours.isnan() & expected.isnan()))
        if bool(unlike.any()):
            at = _first(unlike)
            return Verdict(False, f"{_place(at, rows)} is {ours[at].item()}, must be {expected[at].item()}")
        difference = (ours.double() - exact).abs().masked_fill(special, 0.0)
        bound = 2 * torch_error + epsilon * exact.abs() + _FP32_LOOP * fp32_epsilon * terms
        bound = bound.masked_fill(special, 1.0)
        # Written so that a NaN anywhere fails: NaN <= bound is False.
        within = difference <= bound
        if not bool(within.all()):
            at = _first(~within)
            return Verdict(
                False,
                f"{_place(at, rows)} is {ours[at].item():.8g}, must be {exact[at].item():.8g} ± {bound[at].item():.3g}",
                float(difference.max()),
                math.inf,
            )
        error = max(error, float(difference.max()))
        margin = max(margin, float((difference / bound.clamp_min(torch.finfo(torch.float64).tiny)).max()))
    return Verdict(True, "", error, margin)


def _largest_error(tensor: Tensor, reference: Tensor) -> float:
    difference = (tensor.double() - reference).abs()
    return float(difference[difference.isfinite()].max()) if bool(difference.isfinite().any()) else 0.0


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(index) for index in mask.nonzero()[0])


def _place(at: tuple[int, ...], rows: slice) -> str:
    return f"element {(at[0] + rows.start, *at[1:])}"


def _same_bits(tensor: Tensor, copy: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return torch.equal(tensor.view(integer), copy.view(integer))
