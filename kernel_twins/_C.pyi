"""
The CUDA steps. Each function launches the named step on the current stream and writes into out.
"""
from __future__ import annotations
import collections.abc
import torch
import typing
__all__: list[str] = ['architectures', 'ask_anew', 'attention', 'attention_backward', 'cross_entropy', 'cross_entropy_backward', 'dropout_add', 'dropout_add_backward', 'has', 'kept', 'layer_norm', 'layer_norm_backward', 'linear', 'matmul_bf16', 'matmul_fp32', 'matmul_tf32x3', 'probe', 'product_configuration', 'reduction', 'reduction_nd', 'rms_norm', 'rms_norm_backward', 'runs', 'softmax', 'softmax_backward', 'vector_add']
def ask_anew(anew: bool) -> bool:
    """
    Whether this thread's calls of kept functions ask choose each time; returns what was set before.
    """
def attention(step: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None, *, out: collections.abc.Sequence[torch.Tensor], scale: typing.SupportsFloat | None = None, band: tuple[typing.SupportsInt, typing.SupportsInt] | None = None, softcap: typing.SupportsFloat | None = None, from_end: bool = False) -> None:
    """
    out = softmax(scale * q @ k^T) @ v. q: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], bf16 or fp16; out: [B, H, Sq, D] and the rows' logarithms, fp32 [B, H, Sq]. Query i sees keys i + band[0] to i + band[1]; with from_end Sk - Sq is added to both. The last step takes sequences, too: cu_seqlens_q and cu_seqlens_k, int32 [N + 1], tell which of a single batch's tokens are sequence n's.
    """
def attention_backward(step: str, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, result: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None = None, cu_seqlens_q: torch.Tensor | None = None, cu_seqlens_k: torch.Tensor | None = None, *, out: collections.abc.Sequence[torch.Tensor | None], scale: typing.SupportsFloat | None = None, band: tuple[typing.SupportsInt, typing.SupportsInt] | None = None, softcap: typing.SupportsFloat | None = None, from_end: bool = False, deterministic: bool = False) -> None:
    """
    The gradients of q, k and v through attention. dout, q, result: [B, H, Sq, D], k, v: [B, H_KV, Sk, D], bf16 or fp16; lse, dlse: fp32 [B, H, Sq]; out: dq, dk, dv. The last step takes None for one that is not wanted. Band, softcap and sequences are the forward pass's.
    """
def cross_entropy(step: str, logits: torch.Tensor, target: torch.Tensor, *, out: torch.Tensor | collections.abc.Sequence[torch.Tensor], ignore_index: typing.SupportsInt = -100, label_smoothing: typing.SupportsFloat = 0.0) -> None:
    """
    out = the cross entropy of the rows of logits and their target classes, or a tuple of that and of the logarithms of the sums of exponentials. logits: [M, N], rows contiguous, fp32, bf16 or fp16; target: [M], int64; out: [M], contiguous, fp32. 0 where the target is ignore_index.
    """
def cross_entropy_backward(step: str, logits: torch.Tensor, target: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, *, out: torch.Tensor, ignore_index: typing.SupportsInt = -100, label_smoothing: typing.SupportsFloat = 0.0) -> None:
    """
    out = the gradient of logits through cross_entropy, from lse, which that returned, and dout. logits: [M, N], rows contiguous, fp32, bf16 or fp16; target: [M], int64; lse, dout: [M], fp32; out: [M, N], contiguous.
    """
def dropout_add(step: str, x: torch.Tensor, residual: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, out: torch.Tensor, p: typing.SupportsFloat = 0.5, activation: str = 'none', seed: typing.SupportsInt = 0, offset: typing.SupportsInt = 0) -> None:
    """
    out = dropout(activation(x + bias)) + residual. x, residual: [M, N], rows contiguous, fp32, bf16 or fp16; bias: [N]; out: [M, N], contiguous. Element i is kept where word i % 4 of Philox4x32-10 is at least p * 2**32: its key is seed, its counter offset / 4 and i / 4. offset is a multiple of 4.
    """
def dropout_add_backward(step: str, dout: torch.Tensor, x: torch.Tensor | None = None, bias: torch.Tensor | None = None, *, out: torch.Tensor | collections.abc.Sequence[torch.Tensor], p: typing.SupportsFloat = 0.5, activation: str = 'none', seed: typing.SupportsInt = 0, offset: typing.SupportsInt = 0) -> None:
    """
    out = the gradient of x through dropout_add, or those of x and bias. dout, x: [M, N], rows contiguous, fp32, bf16 or fp16 alike; bias: [N]; out: [M, N] and [N], contiguous. x, and a bias, only with an activation.
    """
def has(op: str, step: str) -> bool:
    """
    Whether a step, or a baseline that is compiled beside the steps, can be launched: it is in this module, or importing kernel_twins._ladder has added it.
    """
def kept(choose: typing.Any) -> typing.Any:
    """
    A function of the same positional arguments that returns what choose returned for a call of equal dtypes, sizes, strides and settings of PyTorch. It asks choose for all others, and for calls under transforms and modes.
    """
def layer_norm(step: str, x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None, *, out: torch.Tensor | collections.abc.Sequence[torch.Tensor], eps: typing.SupportsFloat = 1e-05) -> None:
    """
    out = (x - mean) * rstd * weight + bias over the rows, mean, rstd, and with a residual x + residual, of which the rest then is. x, residual: [M, N], rows contiguous, fp32, bf16 or fp16; weight, bias: [N]; out: [M, N] and [M], contiguous, of x's dtype and fp32.
    """
def layer_norm_backward(step: str, dout: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None = None, dadded: torch.Tensor | None = None, *, out: torch.Tensor | collections.abc.Sequence[torch.Tensor]) -> None:
    """
    out = the gradients of x, weight and bias through layer_norm, without a weight that of x alone. dout, x, dadded: [M, N], rows contiguous, fp32, bf16 or fp16 alike; mean, rstd: [M], fp32; weight: [N]; out: [M, N] and [N], contiguous. dadded, the sum's own gradient, is added to x's.
    """
def linear(step: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *, out: torch.Tensor, activation: str = 'none') -> None:
    """
    out = activation(x @ weight.T + bias), none, relu, gelu, gelu_tanh or silu. x: [M, K], weight: [N, K], any strides; bias: [N], out: [M, N], contiguous; all bf16 or fp16.
    """
def matmul_bf16(step: str, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
    """
    out = a @ b, summed in fp32. a: [M, K], b: [K, N], any strides; out: [M, N], contiguous. a and b are bf16 or fp16 alike, out is so or fp32.
    """
def matmul_fp32(step: str, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
    """
    out = a @ b in fp32. a: [M, K], b: [K, N], any strides; out: [M, N], contiguous.
    """
def matmul_tf32x3(step: str, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
    """
    out = a @ b, fp32 from three TF32 products. a: [M, K], b: [K, N], any strides; out: [M, N], contiguous.
    """
def probe(name: str, buffer: torch.Tensor, iterations: typing.SupportsInt) -> None:
    """
    Launches a probe of hardware-survey/probes.h. buffer: contiguous uint8, overwritten.
    """
def product_configuration(a: torch.Tensor, b: torch.Tensor, *, along_k: bool = False, fp32_out: bool = False) -> str:
    """
    The tile, and the split of K, of the last step's kernel for a @ b, in words. a: [M, K], b: [K, N], bf16 or fp16 alike, on a GPU of 9.0; along_k: as linear, which reads both along K; fp32_out: the result is fp32.
    """
def reduction(step: str, x: torch.Tensor, *, out: torch.Tensor) -> None:
    """
    out = the sum of x. x: contiguous, any shape, fp32, bf16 or fp16; out: fp32, no dimensions.
    """
def reduction_nd(step: str, x: torch.Tensor, *, out: torch.Tensor, dims: collections.abc.Sequence[typing.SupportsInt] = [-1], kind: str = 'sum') -> None:
    """
    out = the sum of x over the axes dims, the mean, the max or the argmax, its place among the reduced ones. x: 1 to 5 axes, any strides, fp32, bf16 or fp16; out: the other axes, contiguous, of x's dtype, for argmax int64.
    """
def rms_norm(step: str, x: torch.Tensor, weight: torch.Tensor | None = None, residual: torch.Tensor | None = None, *, out: torch.Tensor | collections.abc.Sequence[torch.Tensor], eps: typing.SupportsFloat = 1e-06) -> None:
    """
    out = x * rstd * weight over the rows, rstd, and with a residual x + residual, of which the rest then is. x, residual: [M, N], rows contiguous, fp32, bf16 or fp16; weight: [N]; out: [M, N] and [M], contiguous, of x's dtype and fp32.
    """
def rms_norm_backward(step: str, dout: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None = None, dadded: torch.Tensor | None = None, *, out: torch.Tensor | collections.abc.Sequence[torch.Tensor]) -> None:
    """
    out = the gradients of x and weight through rms_norm, without a weight that of x alone. dout, x, dadded: [M, N], rows contiguous, fp32, bf16 or fp16 alike; rstd: [M], fp32; weight: [N]; out: [M, N] and [N], contiguous. dadded, the sum's own gradient, is added to x's.
    """
def runs(arch: str, capability: tuple[typing.SupportsInt, typing.SupportsInt], architectures: str) -> bool:
    """
    Whether a GPU of that compute capability runs a step of that arch, such as >=9.0, compiled for architectures, a list such as 8.0;9.0a.
    """
def softmax(step: str, x: torch.Tensor, *, out: torch.Tensor, log: bool = False) -> None:
    """
    out = softmax(x) over the rows, or its logarithm. x: [M, N], rows contiguous, fp32, bf16 or fp16; out: [M, N], contiguous, of x's dtype.
    """
def softmax_backward(step: str, dout: torch.Tensor, y: torch.Tensor, *, out: torch.Tensor, log: bool = False) -> None:
    """
    out = the gradient of x from dout and softmax's result y, or log_softmax's. dout, y: [M, N], rows contiguous, fp32, bf16 or fp16 alike; out: [M, N], contiguous.
    """
def vector_add(step: str, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
    """
    out = a + b. Contiguous, of one shape; all fp32, bf16 or fp16. out may be a or b.
    """
architectures: str
