"""Inputs, references and checks for the specs of layer_norm and rms_norm, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernel_twins.ops import in_parts, row_cases
from kernel_twins.spec import ITEMSIZE, Case, Output

if TYPE_CHECKING:
    from torch import Generator, Tensor

    Rows = Tensor | float  # [M, 1], or the same for all

_ORDINARY = ("outliers", "shifted")  # values that x, too, may have in a backward pass, since its statistics stay finite


@dataclass(frozen=True, slots=True)
class Norm:
    """layer_norm or rms_norm. layer_norm is ``centered``: a row's mean is subtracted first.

    A method named like an output is its float64 reference, see ``spec.Op``. ``kappa`` in its terms is a row's mean
    magnitude over its deviation: the factor by which rounding grows if the mean is large and the deviation small.
    """

    centered: bool
    eps: float

    # ------------------------------------------------------------------------------------------------------------------
    # Forward
    # ------------------------------------------------------------------------------------------------------------------

    def inputs(self, case: Case, generator: Generator) -> tuple[Tensor, ...]:
        """x with the case's layout and values; weight, bias and a residual laid out as x, if the case has them."""
        x = row_cases.weighted(row_cases.matrix(case, generator, case.get("x")), case)
        x = row_cases.shifted(x, case) if self.centered else x
        affine = _affine(case, generator, self.centered)
        if case.get("residual") == "yes":
            its = case if case.get("values") == "coarse" else case.but(values="")
            return x, *affine, row_cases.matrix(its, generator, case.get("x"))
        return x, *affine

    def outputs(self, case: Case) -> tuple[Output, ...]:
        """y, the statistics and, with a residual, the sum."""
        matrix, statistic = Output(case.shape, case.dtype), Output(case.shape[:1], "fp32")
        statistics = (statistic, statistic) if self.centered else (statistic,)
        return matrix, *statistics, *((matrix,) if case.get("residual") == "yes" else ())

    def bytes(self, case: Case) -> int:
        """x, y and, with a residual, the residual and the sum. Vectors are left out as negligible."""
        return (4 if case.get("residual") == "yes" else 2) * math.prod(case.shape) * ITEMSIZE[case.dtype]

    def options(self, case: Case) -> Mapping[str, Any]:
        return {"eps": self.eps}

    def y(self, case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
        x, weight, bias, residual = self.operands(inputs)
        x = _added(x, residual, part).double()
        mean, rstd, kappa = self._moments(x)
        scale = rstd if weight is None else rstd * weight.double()
        y = (x - mean) * scale
        terms = y.abs() * self._lost(kappa, case.shape[1])
        if self.centered:
            of_mean = x.abs().mean(dim=1, keepdim=True) + row_cases.row_chain(case.shape[1]) * mean.abs()
            terms += scale.abs() * (x.abs() + of_mean)
        return (y, terms) if bias is None else (y + bias.double(), terms + bias.double().abs())

    def mean(self, case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
        x, _, _, residual = self.operands(inputs)
        chain = row_cases.row_chain(case.shape[1])

        def of(x: Tensor) -> tuple[Tensor, Tensor]:
            mean = x.mean(dim=1)
            return mean, x.abs().mean(dim=1) + chain * mean.abs()

        return self._over_rows(x, residual, part, of)

    def rstd(self, case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
        x, _, _, residual = self.operands(inputs)

        def of(x: Tensor) -> tuple[Tensor, Tensor]:
            _, rstd, kappa = self._moments(x)
            return rstd[:, 0], (rstd * self._lost(kappa, case.shape[1]))[:, 0]

        return self._over_rows(x, residual, part, of)

    def added(self, case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
        x, _, _, residual = self.operands(inputs)
        assert residual is not None  # without one there is no such output
        x, residual = x[part].double(), residual[part].double()
        return x + residual, x.abs() + residual.abs()

    def check(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, out: tuple[Tensor, ...]
    ) -> None:
        from kernel_twins.ops import row_checks

        row_checks.require_rows("x", x)
        row_checks.require_vector("weight", weight, "x", x)
        row_checks.require_vector("bias", bias, "x", x)
        row_checks.require_matrix("residual", residual, "x", x)
        names = ["y", *(["mean"] if self.centered else []), "rstd", *([] if residual is None else ["added"])]
        row_checks.require_out(out, names, "x", x)
        row_checks.require_all_apart(out, {"x": x, "weight": weight, "bias": bias, "residual": residual})

    # ------------------------------------------------------------------------------------------------------------------
    # Backward
    # ------------------------------------------------------------------------------------------------------------------

    def backward_inputs(self, case: Case, generator: Generator) -> tuple[Tensor, ...]:
        """dout with the case's layout and values; x and its statistics; weight; the gradient of the sum.

        Where hostile, dout grows with x and has a mean other than 0, so that both sums over a row are as large as their
        terms, and rows at borders weigh most in a column's sums.
        """
        from kernel_twins.ops.tensors import borders

        dout = row_cases.matrix(case, generator, case.get("dout"))
        plain = case.but(values="")
        x = row_cases.weighted(
            row_cases.matrix(case if case.get("values") in _ORDINARY else plain, generator, case.get("x")), case
        )

        mean, rstd = self._rounded_moments(x)
        if case.get("values") == "hostile":
            dout += (x - mean[:, None].to(x.dtype)) * rstd[:, None].to(x.dtype) + 0.5
            dout[borders(case.shape[0])] *= 4
        weight = _affine(case, generator, False)
        dadded = (row_cases.matrix(plain, generator, case.get("dout")),) if case.get("residual") == "yes" else ()
        return dout, x, *((mean,) if self.centered else ()), rstd, *weight, *dadded

    def backward_outputs(self, case: Case) -> tuple[Output, ...]:
        """dx and, with a weight, dweight and dbias."""
        dx, vector = Output(case.shape, case.dtype), Output(case.shape[1:], case.dtype)
        if case.get("affine") == "none":
            return (dx,)
        return (dx, vector, vector) if self.centered else (dx, vector)

    def backward_bytes(self, case: Case) -> int:
        """dout, x, dx and, with a residual, the sum's gradient."""
        return (4 if case.get("residual") == "yes" else 3) * math.prod(case.shape) * ITEMSIZE[case.dtype]

    def statistics(self, x: Tensor) -> tuple[Tensor, ...]:
        """mean (if centered) and rstd, computed in float64 and rounded to fp32."""
        mean, rstd = self._rounded_moments(x)
        return (mean, rstd) if self.centered else (rstd,)

    def dx(self, case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
        return self._dx(case, inputs, part, None)

    def dweight(self, case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
        """``part`` is a slice of the columns, as for dbias."""
        return self._dweight(inputs, part, None)

    # The references for statistics that the forward pass has computed: they have errors, and these propagate. To first
    # order, if rstd is rstd (1 + d), dx becomes
    #     dx + d rstd (g - mean(g) - 3 xhat c1),  c1 = mean(g xhat),
    # since rstd occurs once in the first terms and three times in the last. If mean is mean + e, dx becomes
    #     dx + e rstd^2 (c1 + xhat mean(g)).
    # A row's term of dweight, dout xhat, becomes (1 + d) dout xhat, and dout xhat - e rstd dout.

    def computed_dx(self, case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
        return self._dx(case, inputs, part, self._of_statistics(case, inputs, part))

    def computed_dweight(self, case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
        return self._dweight(inputs, part, self._of_statistics(case, inputs, slice(0, case.shape[0])))

    def _of_statistics(self, case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Rows, Rows]:
        """The bounds of d and of e rstd for those rows, as terms."""
        _, x, mean, rstd, _, _ = self.backward_operands(inputs)
        chain, scale = row_cases.row_chain(case.shape[1]), rstd[part, None].double()
        if mean is None:
            return self._lost(scale, case.shape[1]), 0.0
        magnitude, _ = self._over_rows(x, None, part, lambda some: (some.abs().mean(dim=1),) * 2)
        kappa = magnitude[:, None] * scale
        return self._lost(kappa, case.shape[1]), kappa + chain * mean[part, None].double().abs() * scale

    def _dx(
        self, case: Case, inputs: tuple[Tensor, ...], part: slice, of_statistics: tuple[Rows, Rows] | None
    ) -> tuple[Tensor, Tensor]:
        *_, rstd, weight, dadded = self.backward_operands(inputs)
        dout, xhat = self._dout_xhat(inputs, part, slice(None))
        g = dout if weight is None else dout * weight.double()
        c1 = (g * xhat).mean(dim=1, keepdim=True)
        summed = (g * xhat).abs().mean(dim=1, keepdim=True) + row_cases.row_chain(case.shape[1]) * c1.abs()
        terms = g.abs() + xhat.abs() * summed
        if self.centered:
            terms += g.abs().mean(dim=1, keepdim=True)
        mean = g.mean(dim=1, keepdim=True) if self.centered else 0.0
        dx = g - mean - xhat * c1
        if of_statistics is not None:
            of_rstd, of_mean = of_statistics
            terms += of_rstd * ((g - mean).abs() + 3 * (xhat * c1).abs()) + of_mean * (c1.abs() + (xhat * mean).abs())
        scale = rstd[part, None].double()
        dx, terms = dx * scale, terms * scale
        if dadded is None:
            return dx, terms
        return dx + dadded[part].double(), terms + dadded[part].double().abs()

    def _dweight(
        self, inputs: tuple[Tensor, ...], part: slice, of_statistics: tuple[Rows, Rows] | None
    ) -> tuple[Tensor, Tensor]:
        def of(some: slice) -> tuple[Tensor, Tensor]:
            dout, xhat = self._dout_xhat(inputs, some, part)
            values = dout * xhat
            if of_statistics is None:
                return values, values.abs()
            of_rstd, of_mean = (each if isinstance(each, float) else each[some] for each in of_statistics)
            return values, values.abs() * (1 + of_rstd) + dout.abs() * of_mean

        return in_parts.over_columns(inputs[0], part, of)

    def dbias(self, case: Case, inputs: tuple[Tensor, ...], part: slice) -> tuple[Tensor, Tensor]:
        def of(some: slice) -> tuple[Tensor, Tensor]:
            dout = inputs[0][some, part].double()
            return dout, dout.abs()

        return in_parts.over_columns(inputs[0], part, of)

    def check_backward(
        self,
        dout: Tensor,
        x: Tensor,
        mean: Tensor | None,
        rstd: Tensor,
        weight: Tensor | None,
        dadded: Tensor | None,
        out: Tensor | tuple[Tensor, ...],
    ) -> None:
        from kernel_twins.ops import row_checks
        from kernel_twins.ops.tensors import require_contiguous

        row_checks.require_rows("dout", dout)
        statistics = {"mean": mean, "rstd": rstd} if self.centered else {"rstd": rstd}
        for name, needed in {"x": x, **statistics}.items():
            if needed is None:
                raise TypeError(f"{name} is None, must be a torch.Tensor")
        row_checks.require_matrix("x", x, "dout", dout)
        for name, statistic in statistics.items():
            assert statistic is not None  # checked above
            row_checks.require_numbers(name, statistic, "dout", dout)
            require_contiguous(name, statistic)
        row_checks.require_vector("weight", weight, "dout", dout)
        row_checks.require_matrix("dadded", dadded, "dout", dout)
        names = ["dx"] if weight is None else ["dx", "dweight", *(["dbias"] if self.centered else [])]
        row_checks.require_out(out, names, "dout", dout)
        inputs = {"dout": dout, "x": x, "mean": mean, "rstd": rstd, "weight": weight, "dadded": dadded}
        row_checks.require_all_apart(out, inputs)

    # ------------------------------------------------------------------------------------------------------------------
    # In float64
    # ------------------------------------------------------------------------------------------------------------------

    def operands(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """x, weight, bias and residual."""
        x, *rest = inputs
        given: list[Tensor | None] = [*rest, None, None, None]
        return (x, given[0], given[1], given[2]) if self.centered else (x, given[0], None, given[1])

    def backward_operands(
        self, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]:
        """dout, x, mean, rstd, weight and dadded."""
        dout, x, *rest = inputs
        mean = rest.pop(0) if self.centered else None
        rstd, weight, dadded, *_ = *rest, None, None
        assert rstd is not None
        return dout, x, mean, rstd, weight, dadded

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """mean (0 if not centered), rstd and kappa of every row: [M, 1]."""
        import torch

        magnitude = x.abs().mean(dim=1, keepdim=True)
        mean = x.mean(dim=1, keepdim=True) if self.centered else torch.zeros_like(magnitude)
        rstd = ((x - mean).square().mean(dim=1, keepdim=True) + self.eps).rsqrt()
        return mean, rstd, magnitude * rstd

    def _lost(self, kappa: Tensor, n: int) -> Tensor | float:
        """The terms of rstd over its value. Its relative error is half of that of the sum of squares.

        Welford's formula adds an error of eps(fp32) * kappa, two passes add its square.
        """
        summed = 2 + row_cases.row_chain(n) / 2
        return summed + kappa + 2.0**-23 * kappa.square() if self.centered else summed

    def _rounded_moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """mean (0 if not centered) and rstd of every row, rounded to fp32."""

        def of(x: Tensor) -> tuple[Tensor, Tensor]:
            mean, rstd, _ = self._moments(x)
            return mean[:, 0], rstd[:, 0]

        mean, rstd = self._over_rows(x, None, slice(0, x.shape[0]), of)
        return mean.float(), rstd.float()

    def _over_rows(self, x: Tensor, residual: Tensor | None, part: slice, of: Any) -> tuple[Tensor, Tensor]:
        """Two numbers for every row of x + residual, computed by ``of`` for some rows at a time."""
        return in_parts.over_rows(part, x.shape[1], lambda some: of(_added(x, residual, some).double()))

    def _dout_xhat(self, inputs: tuple[Tensor, ...], part: slice, columns: slice) -> tuple[Tensor, Tensor]:
        dout, x, mean, rstd, _, _ = self.backward_operands(inputs)
        x = x[part, columns].double()
        if mean is not None:
            x = x - mean[part, None].double()
        return dout[part, columns].double(), x * rstd[part, None].double()


LAYER = Norm(centered=True, eps=1e-5)
RMS = Norm(centered=False, eps=1e-6)


def settled(case: Case) -> Case:
    """The same case with sums x + residual that are exact: some baselines normalise them before they round them."""
    if case.get("residual") != "yes" or case.get("values"):
        return case
    return case.but(values="coarse")


def sum_differs(baseline: str, case: Case) -> str:
    """Why a baseline's result differs: it normalises the sum before it is rounded, or fails (``Op.differs``)."""
    if baseline in ("compile", "quack") and case.get("residual") and case.get("values") and case.dtype != "fp32":
        return f"what {baseline} runs normalises the sum before it is rounded"
    if baseline == "quack" and case.get("residual") and case.dtype == "fp32" and case.shape[1] == 65_536:
        return "quack launches two blocks, which do not hold such a row and its residual: the launch fails"
    return ""


def _affine(case: Case, generator: Generator, bias: bool) -> tuple[Tensor, ...]:
    """weight, about 1, and with ``bias`` a bias, except for those that ``affine`` leaves out."""
    from kernel_twins.ops.tensors import normal

    if case.get("affine") == "none":
        return ()
    vectors = [normal(case.but(values=""), case.shape[1:], generator) for _ in range(1 + bias)]
    vectors[0].mul_(0.1).add_(1)
    return tuple(vectors[:1] if case.get("affine") == "weight" else vectors)


def _added(x: Tensor, residual: Tensor | None, part: slice) -> Tensor:
    """Some rows of the norm's input: x, or the rounded sum x + residual."""
    return x[part] if residual is None else x[part] + residual[part]
