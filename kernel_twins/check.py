"""Does a call compute its operation? The gate before every timing, and what the tests assert.

One accuracy rule for all operations, of errors against float64. Each element must be near its own reference::

    |error| <= eps(output) * |ref| + the output's smallest step + noise,  noise = 4 * eps(fp32) * sum|terms| + 2^-122

and where PyTorch loses more than that on the way (``Op.rounds`` names where), + 2 * |PyTorch's error| at that element.
A result that is rounded once is within half of the first term. ``noise`` admits a plain fp32 loop: over random terms
it errs by 0.24 eps * sum|terms| (standard deviation) and by up to 2.3 in 200,000 sums, whatever their length. Where a
sum has a sign, its partial sums grow with it, and L additions err by up to eps / 2 of each: by sqrt(L) / 6 eps * |sum|
(standard deviation), so sqrt(L) / 4 * |sum| counts among the terms, six times as much (tensors.chain). cuBLAS needs
that as our products do. ``noise`` admits kernels besides that take fp32's subnormal numbers for zero, also before they
multiply them. Products of random terms in TF32 or bf16 stay a hundred times outside.

What stays within a place everywhere may still be wrong everywhere alike. So in each row (of an output of one dimension,
in the whole)::

    RMS(error) <= 1.25 * PyTorch's + RMS(noise)
    mean(round(ref - noise)) <= mean(result) <= mean(round(ref + noise))

The second holds for whatever errs by up to noise and is rounded once: no chance is in it, and no share of an element's
own rounding, which takes itself away over a row. With ``Op.rounds``, + 2 * |PyTorch's mean error| and + 4 standard
errors of such a mean, RMS(PyTorch's error) / sqrt(the row's length), on either side: where roundings are independent,
PyTorch's own may come to nothing by chance. No maximum over a row or an output has a say.

Baselines are other people's, and round where they like. Of an element they are allowed what PyTorch's accuracy makes
likely, 2 * |PyTorch's error| + 6 * RMS(PyTorch's error) in its row, besides; and rows are not judged.

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
_ROUNDED = 2  # times PyTorch's error at the element
_RMS = 1.25  # times PyTorch's of the row
_DEVIATIONS = 6  # of PyTorch's errors
_STANDARD_ERRORS = 4  # of the mean of PyTorch's errors
_SUBNORMAL = 2.0**-122  # 16 times fp32's smallest normal number
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


def check(op: Op, call: Call, case: Case, *, device: str = "cuda", seed: int = 0, is_baseline: bool = False) -> Verdict:
    """Run ``call`` on one case, and on its hostile inputs, and judge everything it did.

    Exceptions of the call pass through.
    """
    verdict = _check_values(op, call, case, device, seed, is_baseline)
    hostile = case.hostile if op.hostile and verdict.ok else None
    if hostile is None:
        return verdict
    other = _check_values(op, call, hostile, device, seed, is_baseline)
    if not other.ok:
        return replace(other, reason=f"values.hostile: {other.reason}")
    return replace(verdict, margin=max(verdict.margin, other.margin))


def _check_values(op: Op, call: Call, case: Case, device: str, seed: int, is_baseline: bool) -> Verdict:
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
    return compare(op, case, inputs, outputs, is_baseline=is_baseline)


def check_baseline(op: Op, call: Call, case: Case, *, device: str = "cuda") -> Verdict:
    """The same of a baseline, whose random numbers are its own: at the case without any."""
    return check(op, call, op.settled(case), device=device, is_baseline=True)


def compare(
    op: Op, case: Case, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], *, is_baseline: bool = False
) -> Verdict:
    """Judge outputs against float64 and against PyTorch at the same dtype."""
    torch_call = op.exemplar or load_baseline(op.name, next(iter(op.baselines)))
    torch_outs = _results(op, torch_call, case, inputs, tuple(torch.empty_like(each) for each in outputs))
    references = (op.reference, *op.more_references)
    verdicts = []
    for index, (out, torch_out) in enumerate(zip(outputs, torch_outs, strict=True)):
        rule = _of_baselines if is_baseline else partial(_of_steps, rounds=bool(op.rounds))
        verdict = _judge(partial(references[index], case, inputs), out, torch_out, rule)
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


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of an output, in float64; what is infinite or NaN counts as 0 there."""

    exact: Tensor
    error: Tensor
    torch_error: Tensor
    noise: Tensor
    counts: Tensor  # [rows], of the elements that count
    dtype: torch.dtype  # the output's

    def rounding(self) -> Tensor:
        numbers = torch.finfo(self.dtype)
        return numbers.eps * (self.exact.abs() + numbers.tiny)

    def mean(self, values: Tensor) -> Tensor:
        """[rows]; an output of one dimension is one row."""
        return values.reshape(len(self.counts), -1).sum(1) / self.counts

    def rms(self, values: Tensor) -> Tensor:
        return self.mean(values.square()).sqrt()


def _of_steps(rows: _Rows, *, rounds: bool) -> tuple[Tensor, str]:
    """The bound of each element's error, and which of the rows' conditions fails; see above."""
    bound = rows.rounding() + rows.noise
    lowest, highest = (
        rows.mean((rows.exact + noise).to(rows.dtype).double() - rows.exact) for noise in (-rows.noise, rows.noise)
    )
    if rounds:
        bound = bound + _ROUNDED * rows.torch_error.abs()
        usual = _ROUNDED * rows.mean(rows.torch_error).abs()
        usual += _STANDARD_ERRORS * rows.rms(rows.torch_error) / rows.counts.sqrt()
        lowest, highest = lowest - usual, highest + usual
    rms, mean = rows.rms(rows.error), rows.mean(rows.error)
    most = _RMS * rows.rms(rows.torch_error) + rows.rms(rows.noise)
    if bool((beyond := rms > most).any()):
        row = _first(beyond)[0]
        return bound, f"row {row} has an RMS error of {rms[row].item():.3g}, must be up to {most[row].item():.3g}"
    if bool((beyond := (mean < lowest) | (mean > highest)).any()):
        row = _first(beyond)[0]
        told = f"from {lowest[row].item():.3g} to {highest[row].item():.3g}"
        return bound, f"row {row} has a mean error of {mean[row].item():.3g}, must be {told}"
    return bound, ""


def _of_baselines(rows: _Rows) -> tuple[Tensor, str]:
    torch_error = rows.torch_error.nan_to_num(0.0)  # where PyTorch makes NaN of what is none
    usual = rows.rms(torch_error).reshape(-1, *[1] * (rows.exact.dim() - 1))
    of_torch = _ROUNDED * torch_error.abs() + _DEVIATIONS * usual
    return rows.rounding() + rows.noise + of_torch, ""


def _judge(
    reference: Callable[[slice], tuple[Tensor, Tensor]],
    out: Tensor,
    torch_out: Tensor,
    rule: Callable[[_Rows], tuple[Tensor, str]],
) -> Verdict:
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
    error = margin = 0.0
    for start in range(0, out.shape[0], step):
        part = slice(start, min(start + step, out.shape[0]))
        verdict = _judge_rows(*reference(part), out[part], torch_out[part], part, rule)
        if not verdict.ok:
            return verdict
        error, margin = max(error, verdict.error), max(margin, verdict.margin)
    return Verdict(True, "", error, margin)


def _judge_rows(
    exact: Tensor,
    terms: Tensor,
    ours: Tensor,
    torchs: Tensor,
    part: slice,
    rule: Callable[[_Rows], tuple[Tensor, str]],
) -> Verdict:
    """Of some rows of an output."""
    expected = exact.to(ours.dtype)
    special = ~expected.isfinite()
    unlike = special & ~((ours == expected) | (ours.isnan() & expected.isnan()))
    if bool(unlike.any()):
        at = _first(unlike)
        return Verdict(False, f"{_place(at, part)} is {ours[at].item()}, must be {expected[at].item()}")

    noise = _FP32_LOOP * torch.finfo(torch.float32).eps * terms + _SUBNORMAL
    exact, error, torch_error, noise = (
        each.masked_fill(special, 0.0) for each in (exact, ours.double() - exact, torchs.double() - exact, noise)
    )
    counts = (~special).reshape(len(exact) if exact.dim() > 1 else 1, -1).sum(1).clamp_min(1)
    rows = _Rows(exact, error, torch_error, noise, counts, ours.dtype)
    bound, failing = rule(rows)
    difference = rows.error.abs()
    largest = float(difference.max())
    # Written so that a NaN anywhere fails: NaN <= bound is False.
    within = difference <= bound
    if not bool(within.all()):
        at = _first(~within)
        must = f"{exact[at].item():.8g} ± {bound[at].item():.3g}"
        return Verdict(False, f"{_place(at, part)} is {ours[at].item():.8g}, must be {must}", largest, math.inf)
    if failing:
        return Verdict(False, failing if part.start == 0 else f"from row {part.start} on, {failing}", largest, math.inf)
    return Verdict(True, "", largest, float((difference / bound).max()))


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(index) for index in mask.nonzero()[0])


def _place(at: tuple[int, ...], rows: slice) -> str:
    return f"element {(at[0] + rows.start, *at[1:])}"


def _same_bits(tensor: Tensor, copy: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return torch.equal(tensor.view(integer), copy.view(integer))
