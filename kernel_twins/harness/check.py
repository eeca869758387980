"""Does a call compute its operation? The gate before every timing, and the assertion of the tests.

One accuracy rule for all operations, of errors against float64. Each element must be near its own reference::

    |error| <= eps(output) * |ref| + the output's smallest step + noise,  noise = 4 * eps(fp32) * sum|terms| + 2^-122

If PyTorch itself loses more than that (``Op.rounds`` says where), 2 * |PyTorch's error| at that element is added. A
result that is rounded once is within half of the first term. ``noise`` admits a plain fp32 loop:

- Over random terms partial sums stay small, and the loop's error is below half of 4 eps * sum|terms|, at any length.
- If a sum has a sign, its partial sums grow, and each of L additions adds an error of up to eps / 2 of them: together
  sqrt(L) / 6 eps * |sum| (standard deviation). So sqrt(L) / 4 * |sum| counts among the terms, six times as much
  (tensors.chain). L is K for products, the elements of a thread for reductions, and for sums along rows the elements of
  a thread of the smallest block. cuBLAS needs this term as our products do.

Products of random terms in TF32 or bf16 are far outside of the bound. A product of bf16 in three parts is inside; it is
as accurate as a long fp32 loop. ``noise`` also admits kernels that treat fp32's subnormal numbers as zero, even before
they multiply them.

A bias below the output's precision shows only over a row, where roundings average out and a bias does not. So in each
row (for an output of one dimension, in each part of 2^26 elements)::

    RMS(error) <= 1.25 * PyTorch's + RMS(noise)
    mean(round(ref - noise)) <= mean(result) <= mean(round(ref + noise))

The second condition holds for certain for every result with an error of up to noise that is rounded once, since
rounding keeps order. With ``Op.rounds``, both sides are widened by 2 * |PyTorch's mean error| and by 4 standard errors
of such a mean, RMS(PyTorch's error) / sqrt(the row's length): with independent roundings PyTorch's own mean error may
be near 0 by chance. With ``Op.deviation``, PyTorch's RMS counts as no less than that of one rounding of each term and
of the result, and the RMS may be larger by 4 standard errors. No maximum over a row or an output enters the rule.

Baselines are other people's code, and may round at other places. An element's bound is widened for them by 2 *
|PyTorch's error| + 6 * RMS(PyTorch's error) of its row, and rows are not judged. Baselines are not judged on hostile
inputs either: people use what is right on ordinary inputs, so its time counts.

Our calls are judged on a case's plain inputs and, if the operation has them, on hostile ones. Outputs are poisoned and
guarded before the call, and inputs are compared with a copy after it. That finds stale values, a missed tail, a write
past the end, and a changed input.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernel_twins.harness.load import Call, load_baseline
from kernel_twins.ops.tensors import OUT_DTYPE, empty_outputs
from kernel_twins.spec import Case, Op, Output

_GUARD = 256  # bytes before and behind every output; keeps its address as aligned as torch's own
_POISON = 0xFF  # in every byte: NaN in each float dtype, and no valid index
_FP32_LOOP = 4  # factor of eps(fp32) * sum|terms|, see above
_ROUNDED = 2  # factor of PyTorch's error at the element
_RMS = 1.25  # factor of PyTorch's RMS error of the row
_DEVIATIONS = 6  # factor of PyTorch's RMS error, for baselines, and of rounded terms' standard deviation
_STANDARD_ERRORS = 4  # factor of the standard error of PyTorch's mean error
_SUBNORMAL = 2.0**-122  # 16 times fp32's smallest normal number
_CHUNK = 2**26  # output elements held in float64 at a time
_MOST_KEPT = 2**28  # references of larger outputs are not kept for the next call


@dataclass(frozen=True, slots=True)
class Verdict:
    """``ok``, or the ``reason`` why not.

    ``error`` is the largest absolute error of the first output, or of the wrong one. ``margin`` is the largest ratio of
    an error to its bound, over all outputs.
    """

    ok: bool
    reason: str = ""
    error: float = 0.0
    margin: float = 0.0


class NotJudgedError(RuntimeError):
    """The judge ran out of memory; the call is not to blame."""


@contextlib.contextmanager
def judging() -> Iterator[None]:
    """Turns an out-of-memory error within into NotJudgedError, so that it is not taken for the call's own."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise NotJudgedError("the judge ran out of memory") from error


class GuardedOutput:
    """An output tensor full of NaN, between guard bytes that a call must not write."""

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
    """A case's generator of random numbers: the same for every step and backend."""
    return torch.Generator(device=device).manual_seed(seed)


class Judge:
    """Judges calls of one case on its plain and its hostile inputs; baselines on the plain ones only.

    The results of float64 and PyTorch are computed at the first call and kept for the others, if they are not too
    large.
    """

    def __init__(self, op: Op, case: Case, *, device: str = "cuda", seed: int = 0) -> None:
        self._op, self._cases = op, op.judged_cases(case)
        self._draw: Callable[[Case], tuple[Tensor, ...]] = lambda each: op.inputs(each, generator(each, device, seed))
        self._problems: dict[Case, Problem] = {}

    def __call__(self, call: Call, *, is_baseline: bool = False) -> Verdict:
        """Run a call on all of its inputs, and judge everything it did. Exceptions of the call pass through."""
        verdicts: list[Verdict] = []
        cases = self._cases[:1] if is_baseline else self._cases
        try:
            for case in cases:
                if case not in self._problems:
                    with judging():
                        self._problems[case] = Problem(self._op, case, self._draw(case))
                found = self._problems[case].run(call, is_baseline=is_baseline)
                if not found.ok:
                    return replace(found, reason=f"values.hostile: {found.reason}") if verdicts else found
                verdicts.append(found)
        finally:
            if len(verdicts) < len(cases):
                self._problems.clear()  # a wrong call may have overwritten them
        return replace(verdicts[0], margin=max(verdict.margin for verdict in verdicts))


def check(op: Op, call: Call, case: Case, *, device: str = "cuda", seed: int = 0) -> Verdict:
    """Run ``call`` on one case, and on its hostile inputs, and judge everything it did.

    Exceptions of the call pass through.
    """
    return Judge(op, case, device=device, seed=seed)(call)


def check_baseline(op: Op, call: Call, case: Case, *, device: str = "cuda") -> Verdict:
    """The same for a baseline, on plain inputs only, at ``Op.settled``: its random numbers are not ours."""
    return Judge(op, op.settled(case), device=device)(call, is_baseline=True)


def compare(op: Op, case: Case, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> Verdict:
    """Judge outputs against float64 and against PyTorch at the same dtype."""
    return Problem(op, case, inputs).compare(outputs)


def _results(
    op: Op, call: Call, case: Case, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    """The results of a call: the ``outputs`` that it was given, or the tensors that it returned instead.

    A baseline may return None in the place of one that it does not tell.
    """
    returned = call(*inputs, **op.options(case), out=outputs[0] if len(outputs) == 1 else outputs)
    if isinstance(returned, Tensor):
        return (returned,)
    return returned if isinstance(returned, tuple) else outputs


@dataclass(frozen=True, slots=True)
class _Rows:
    """The reference of some rows of an output, in float64; infinities and NaN are replaced by 0 there."""

    rows: slice
    expected: Tensor  # rounded to the output's dtype
    special: Tensor
    exact: Tensor
    noise: Tensor
    deviation: Tensor | None  # of results whose terms are rounded
    torch_out: Tensor
    counts: Tensor  # [rows], finite elements
    most: Tensor  # [rows], bound of the RMS error
    lowest: Tensor  # [rows], bounds of the mean error
    highest: Tensor

    def error(self, out: Tensor) -> Tensor:
        return (out.double() - self.exact).masked_fill_(self.special, 0.0)

    def bound(self, *, rounds: bool, is_baseline: bool) -> Tensor:
        """The bound of each element's error; see above."""
        numbers = torch.finfo(self.expected.dtype)
        bound = numbers.eps * (self.exact.abs() + numbers.tiny) + self.noise
        if self.deviation is not None:
            bound += _DEVIATIONS * self.deviation
        if rounds or is_baseline:
            torch_error = _finite(self.error(self.torch_out))
            bound += _ROUNDED * torch_error.abs()
            if is_baseline:
                usual = _rms(torch_error, self.counts)
                bound += _DEVIATIONS * usual.reshape(-1, *[1] * (bound.dim() - 1))
        return bound

    def failing(self, error: Tensor) -> str:
        """The message for the first condition on rows that fails; empty if none does."""
        rms, mean = _rms(error, self.counts), _mean(error, self.counts)
        if bool((beyond := rms > self.most).any()):
            row = _first(beyond)[0]
            told = f"an RMS error of {rms[row].item():.3g}, must be up to {self.most[row].item():.3g}"
        elif bool((beyond := (mean < self.lowest) | (mean > self.highest)).any()):
            row = _first(beyond)[0]
            told = f"a mean error of {mean[row].item():.3g}, must be from {self.lowest[row].item():.3g} to "
            told += f"{self.highest[row].item():.3g}"
        else:
            return ""
        return f"row {row + self.rows.start} has {told}" if self.exact.dim() > 1 else f"the output has {told}"


def _finite(torch_error: Tensor) -> Tensor:
    """PyTorch's error, with 0 where PyTorch gives NaN or an infinity for a finite reference."""
    return torch_error.nan_to_num_(0.0, 0.0, 0.0)


def _mean(values: Tensor, counts: Tensor) -> Tensor:
    """The mean of each row, [rows]; an output of one dimension is one row."""
    return values.reshape(len(counts), -1).sum(1) / counts


def _rms(values: Tensor, counts: Tensor) -> Tensor:
    return _mean(values.square(), counts).sqrt()


class Problem:
    """One set of inputs of a case, with the results of float64 and PyTorch."""

    def __init__(self, op: Op, case: Case, inputs: tuple[Tensor, ...]) -> None:
        self.case, self.inputs = case, inputs
        self._op = op
        self._torch_outs: tuple[Tensor | None, ...] = ()
        self._kept: dict[int, list[_Rows]] = {}

    def run(self, call: Call, *, is_baseline: bool = False) -> Verdict:
        """Run a call, and judge its results, its guard bytes and its inputs."""
        op, case, inputs = self._op, self.case, self.inputs
        offset = int(case.get("offset", "0"))
        with judging():
            guarded = [GuardedOutput(output, inputs[0].device, offset) for output in op.outputs(case)]
            before = tuple(tensor.clone() for tensor in inputs)
        outputs = _results(op, call, case, inputs, tuple(each.tensor for each in guarded))
        with judging():
            if not all(each.intact() for each in guarded):
                return Verdict(False, "wrote outside its output")
            for index, (tensor, copy) in enumerate(zip(inputs, before, strict=True)):
                if not _same_bits(tensor, copy):
                    return Verdict(False, f"changed its input {index}")
        for each, wanted in zip(outputs, op.outputs(case), strict=True):
            if each is None:
                if not is_baseline:
                    return Verdict(False, "returned None for a result")
                continue
            if (tuple(each.shape), each.dtype) != (wanted.shape, OUT_DTYPE[wanted.dtype]):
                shape, dtype = tuple(each.shape), each.dtype
                return Verdict(
                    False, f"returned {shape} of {dtype}, must be {wanted.shape} of {OUT_DTYPE[wanted.dtype]}"
                )
        return self.compare(outputs, is_baseline=is_baseline)

    def compare(self, outputs: tuple[Tensor | None, ...], *, is_baseline: bool = False) -> Verdict:
        """Judge outputs; NotJudgedError if memory does not suffice for that."""
        verdicts = []
        for index, out in enumerate(outputs):
            if out is None:
                continue
            with judging():
                verdict = self._judge(index, out, is_baseline)
            if not verdict.ok:
                of = f"out[{index}]: " if len(outputs) > 1 else ""
                return replace(verdict, reason=of + verdict.reason)
            verdicts.append(verdict)
        return Verdict(True, "", verdicts[0].error, max(verdict.margin for verdict in verdicts))

    def exact(self, index: int, rows: slice) -> Tensor:
        """The reference of an output's rows, in float64 (whole numbers for an output of indices)."""
        return self._reference(index, rows)[0]

    def _reference(self, index: int, rows: slice) -> tuple[Tensor, Tensor]:
        return (self._op.reference, *self._op.more_references)[index](self.case, self.inputs, rows)

    def _judge(self, index: int, out: Tensor, is_baseline: bool) -> Verdict:
        out = out.reshape(1) if out.dim() == 0 else out
        if out.numel() == 0:
            return Verdict(True)
        if not out.is_floating_point():  # indices must be equal
            exact = self.exact(index, slice(0, out.shape[0]))
            if bool((unlike := out != exact).any()):
                at = _first(unlike)
                return Verdict(False, f"{_place(at, 0)} is {out[at].item()}, must be {exact[at].item()}")
            return Verdict(True)

        error = margin = 0.0
        for rows in self._rows(index, out):
            verdict = _judge_rows(rows, out[rows.rows], bool(self._op.rounds), is_baseline)
            if not verdict.ok:
                return verdict
            error, margin = max(error, verdict.error), max(margin, verdict.margin)
        return Verdict(True, "", error, margin)

    def _rows(self, index: int, out: Tensor) -> Iterable[_Rows]:
        """The references of an output, as many rows at a time as fit. They are kept, unless the output is too large."""
        if out.numel() > _MOST_KEPT:
            return self._described(index, out)
        if index not in self._kept:
            self._kept[index] = list(self._described(index, out))
        return self._kept[index]

    def _described(self, index: int, out: Tensor) -> Iterator[_Rows]:
        if not self._torch_outs:
            call = self._op.exemplar or load_baseline(self._op.name, next(iter(self._op.baselines)))
            like = empty_outputs(self._op, self.case, out.device)
            given = like if isinstance(like, tuple) else (like,)
            self._torch_outs = _results(self._op, call, self.case, self.inputs, given)
        torch_out = self._torch_outs[index]
        assert torch_out is not None  # the exemplar tells all
        torch_out = torch_out.reshape(1) if torch_out.dim() == 0 else torch_out
        deviations = (self._op.deviation, *self._op.more_deviations)
        step = max(1, _CHUNK // max(1, out.numel() // out.shape[0]))
        for start in range(0, out.shape[0], step):
            part = slice(start, min(start + step, out.shape[0]))
            exact, terms = self._reference(index, part)
            rounded = deviations[index] if index < len(deviations) else None
            deviation = rounded(self.case, self.inputs, part) if rounded else None
            yield _described_rows(part, exact, terms, deviation, torch_out[part], bool(self._op.rounds))


def _described_rows(
    part: slice, exact: Tensor, terms: Tensor, deviation: Tensor | None, torch_out: Tensor, rounds: bool
) -> _Rows:
    expected = exact.to(torch_out.dtype)
    special = ~expected.isfinite()
    noise = _FP32_LOOP * torch.finfo(torch.float32).eps * terms + _SUBNORMAL
    exact, torch_error, noise = (
        each.masked_fill(special, 0.0).contiguous() for each in (exact, torch_out.double() - exact, noise)
    )
    torch_error = _finite(torch_error)
    counts = (~special).reshape(len(exact) if exact.dim() > 1 else 1, -1).sum(1).clamp_min(1)
    lowest, highest = (_mean((exact + sign * noise).to(expected.dtype).double() - exact, counts) for sign in (-1, 1))
    usual = _rms(torch_error, counts)
    if deviation is not None:
        deviation = deviation.masked_fill(special, 0.0)
        once = expected.double().masked_fill(special, 0.0) - exact
        alone = (_mean(once.square(), counts) + _mean(deviation.square(), counts)).sqrt()
        # Results along the last dimension share the roundings of their terms: only what lies apart is independent.
        alone *= 1 + _STANDARD_ERRORS / (2 * counts / exact.shape[-1]).clamp_min(1).sqrt()
        usual = torch.maximum(usual, alone)
    if rounds:
        by_chance = _ROUNDED * _mean(torch_error, counts).abs() + _STANDARD_ERRORS * usual / counts.sqrt()
        lowest, highest = lowest - by_chance, highest + by_chance
    most = _RMS * usual + _rms(noise, counts)
    return _Rows(part, expected, special, exact, noise, deviation, torch_out, counts, most, lowest, highest)


def _judge_rows(rows: _Rows, out: Tensor, rounds: bool, is_baseline: bool) -> Verdict:
    unlike = rows.special & ~((out == rows.expected) | (out.isnan() & rows.expected.isnan()))
    if bool(unlike.any()):
        at = _first(unlike)
        place = _place(at, rows.rows.start)
        return Verdict(False, f"{place} is {out[at].item()}, must be {rows.expected[at].item()}")
    error = rows.error(out)
    bound = rows.bound(rounds=rounds, is_baseline=is_baseline)
    difference = error.abs()
    largest = float(difference.max())
    # With <= a NaN anywhere fails: NaN <= bound is False.
    within = difference <= bound
    if not bool(within.all()):
        at = _first(~within)
        place, must = _place(at, rows.rows.start), f"{rows.exact[at].item():.8g} ± {bound[at].item():.3g}"
        return Verdict(False, f"{place} is {out[at].item():.8g}, must be {must}", largest, math.inf)
    if not is_baseline and (failing := rows.failing(error)):
        return Verdict(False, failing, largest, math.inf)
    return Verdict(True, "", largest, float((difference / bound).max()))


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(index) for index in mask.nonzero()[0])


def _place(at: tuple[int, ...], first_row: int) -> str:
    return f"element {(at[0] + first_row, *at[1:])}"


def _same_bits(tensor: Tensor, copy: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return torch.equal(tensor.view(integer), copy.view(integer))
