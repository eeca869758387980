"""
The CUDA steps. Each function launches the named step on the current stream and writes into out.
"""
from __future__ import annotations
import collections.abc
import torch
import typing
__all__: list[str] = ['architectures', 'layer_norm', 'layer_norm_backward', 'linear', 'matmul_bf16', 'matmul_fp32', 'matmul_tf32x3', 'probe', 'reduction', 'rms_norm', 'rms_norm_backward', 'softmax', 'softmax_backward', 'vector_add']
def layer_norm(step: str, x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None, *, out: torch.Tensor | collections.abc.Sequence[torch.Tensor], eps: typing.SupportsFloat = 1e-05) -> None:
    """
    out = (x - mean) * rstd * weight + bias over the rows, mean, rstd, and with a residual x + residual, of which the rest then is. x, residual: [M, N], rows contiguous, fp32, bf16 or fp16; weight, bias: [N]; out: [M, N] and [M], contiguous, of x's dtype and fp32.
    """
def layer_norm_backward(step: str, dout: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None = None, dadded: torch.Tensor | None = None, *, out: torch.Tensor | collections.abc.Sequence[torch.Tensor]) -> None:
    """
    out = the gradients of x, weight and bias through layer_norm, without a weight that of x alone. dout, x, dadded: [M, N], rows contiguous, fp32, bf16 or fp16 alike; mean, rstd: [M], fp32; weight: [N]; out: [M, N] and [N], contiguous. dadded, the sum's own gradient, is added to x's.
    """
def linear(step: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, activation: str = 'none') -> None:
    """
    out = activation(x @ weight.T + bias), none, relu, gelu, gelu_tanh or silu. x: [M, K], weight: [N, K], any strides; bias: [N], out: [M, N], contiguous; all bf16 or fp16.
    """
def matmul_bf16(step: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """
    out = a @ b, summed in fp32. a: [M, K], b: [K, N], any strides; out: [M, N], contiguous. a and b are bf16 or fp16 alike, out is so or fp32.
    """
def matmul_fp32(step: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """
    out = a @ b in fp32. a: [M, K], b: [K, N], any strides; out: [M, N], contiguous.
    """
def matmul_tf32x3(step: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """
    out = a @ b, fp32 from three TF32 products. a: [M, K], b: [K, N], any strides; out: [M, N], contiguous.
    """
def probe(name: str, buffer: torch.Tensor, iterations: typing.SupportsInt) -> None:
    """
    Launches a probe of hardware-survey/probes.h. buffer: contiguous uint8, overwritten.
    """
def reduction(step: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """
    out = the sum of x. x: contiguous, any shape, fp32, bf16 or fp16; out: fp32, no dimensions.
    """
def rms_norm(step: str, x: torch.Tensor, weight: torch.Tensor | None = None, residual: torch.Tensor | None = None, *, out: torch.Tensor | collections.abc.Sequence[torch.Tensor], eps: typing.SupportsFloat = 1e-06) -> None:
    """
    out = x * rstd * weight over the rows, rstd, and with a residual x + residual, of which the rest then is. x, residual: [M, N], rows contiguous, fp32, bf16 or fp16; weight: [N]; out: [M, N] and [M], contiguous, of x's dtype and fp32.
    """
def rms_norm_backward(step: str, dout: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None = None, dadded: torch.Tensor | None = None, *, out: torch.Tensor | collections.abc.Sequence[torch.Tensor]) -> None:
    """
    out = the gradients of x and weight through rms_norm, without a weight that of x alone. dout, x, dadded: [M, N], rows contiguous, fp32, bf16 or fp16 alike; rstd: [M], fp32; weight: [N]; out: [M, N] and [N], contiguous. dadded, the sum's own gradient, is added to x's.
    """
def softmax(step: str, x: torch.Tensor, out: torch.Tensor, log: bool = False) -> None:
    """
    out = softmax(x) over the rows, or its logarithm. x: [M, N], rows contiguous, fp32, bf16 or fp16; out: [M, N], contiguous, of x's dtype.
    """
def softmax_backward(step: str, dout: torch.Tensor, y: torch.Tensor, out: torch.Tensor, log: bool = False) -> None:
    """
    out = the gradient of x from dout and softmax's result y, or log_softmax's. dout, y: [M, N], rows contiguous, fp32, bf16 or fp16 alike; out: [M, N], contiguous.
    """
def vector_add(step: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """
    out = a + b. Contiguous, of one shape; all fp32, bf16 or fp16. out may be a or b.
    """
architectures: str
