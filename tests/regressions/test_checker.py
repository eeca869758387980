"""Wrong kernels in half precision whose errors are less than PyTorch's largest over the whole output."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS  # noqa: E402
from kernel_twins.harness.check import check  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

BY_DTYPE = pytest.mark.parametrize("dtype", ["bf16", "fp16"])


def is_refused(op: str, wrong: Callable[..., None], m: int, n: int, dtype: str) -> bool:
    return not check(OPS[op], wrong, Case.of(m, n, dtype=dtype), device="cpu").ok


@BY_DTYPE
@pytest.mark.parametrize("n", [32_768, 151_936])
def test_checker_takes_cross_entropy_backward_without_softmax(n: int, dtype: str) -> None:
    """The target's column alone is written, and zeros everywhere else."""

    def target_alone(logits, target, lse, dout, *, out, ignore_index, label_smoothing):
        out.zero_()
        p = torch.exp(logits.float().gather(1, target[:, None]) - lse[:, None])
        out.scatter_(1, target[:, None], ((p - 1) * dout[:, None]).to(out.dtype))

    assert is_refused("cross_entropy_backward", target_alone, 8, n, dtype)


@BY_DTYPE
def test_checker_takes_layer_norm_backward_without_its_means(dtype: str) -> None:
    """In dx is nothing of either sum over the row."""

    def without_means(dout, x, mean, rstd, weight, *, out):
        dx, dweight, dbias = out
        dx.copy_(dout.float() * weight.float() * rstd[:, None])
        dweight.copy_((dout.float() * (x.float() - mean[:, None]) * rstd[:, None]).sum(0))
        dbias.copy_(dout.float().sum(0))

    assert is_refused("layer_norm_backward", without_means, 64, 65_536, dtype)


@BY_DTYPE
def test_checker_takes_softmax_with_small_results_zeroed(dtype: str) -> None:
    """A twentieth of a row is 0."""

    def small_zeroed(x, *, out, log):
        y = torch.softmax(x.float(), 1)
        out.copy_(y.masked_fill(y < 2.9e-5, 0))

    assert is_refused("softmax", small_zeroed, 64, 4_096, dtype)


@BY_DTYPE
def test_checker_takes_layer_norm_with_a_bias_of_its_own(dtype: str) -> None:
    """A hundredth of a standard deviation is added to every element."""

    def shifted(x, weight, bias, *, out, eps):
        y, mean, rstd = out
        wide = x.float()
        mean.copy_(wide.mean(1))
        rstd.copy_((wide.var(1, unbiased=False) + eps).rsqrt())
        y.copy_((wide - mean[:, None]) * rstd[:, None] * weight.float() + bias.float() + 0.012)

    assert is_refused("layer_norm", shifted, 64, 4_096, dtype)


def softmax(x, *, out, log):
    e = torch.exp(x.float() - x.float().amax(1, keepdim=True))
    out.copy_(e / e[:, :-64].sum(1, keepdim=True))


def softmax_backward(dout, y, *, out, log):
    products = y.float() * dout.float()
    out.copy_(products - y.float() * products[:, :-8].sum(1, keepdim=True))


def cross_entropy(logits, target, *, out, ignore_index, label_smoothing):
    x = logits.float()
    out.copy_(torch.logsumexp(x[:, :-64], 1) - x.gather(1, target[:, None])[:, 0])


@BY_DTYPE
@pytest.mark.parametrize(("wrong", "n"), [(softmax, 65_536), (softmax_backward, 4_096), (cross_entropy, 32_768)])
def test_checker_takes_sums_that_miss_the_last_elements(wrong: Callable[..., None], n: int, dtype: str) -> None:
    """64 of 65,536, 8 of 4,096, and 64 of 32,768."""
    assert is_refused(wrong.__name__, wrong, 16, n, dtype)
