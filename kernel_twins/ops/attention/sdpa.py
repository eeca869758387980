"""The baselines of attention: PyTorch's scaled_dot_product_attention, as it chooses and by name, and FlexAttention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernel_twins.errors import UnavailableError
from kernel_twins.ops import baselines
from kernel_twins.ops.attention.reference import spans_of, visible
from kernel_twins.ops.attention.shared import Band
from kernel_twins.spec import Case

if TYPE_CHECKING:
    from torch import Tensor, device


def is_full(band: Band, q: Tensor, k: Tensor) -> bool:
    """Whether every query sees every key."""
    return band[0] <= 1 - q.shape[2] and band[1] >= k.shape[2] - 1


def is_causal(band: Band, q: Tensor) -> bool:
    """Whether it is PyTorch's ``is_causal``: query i sees keys 0 to i."""
    return band[0] <= 1 - q.shape[2] and band[1] == 0


def is_aligned(tensor: Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in tensor.stride()[:3])


def differs(baseline: str, case: Case) -> str:
    """Kernels take the maximum of the products, which a negative scale makes the minimum; a softcap comes before it."""
    if case.get("scale") == "neg" and (
        baseline in ("torch", "cudnn", "flash") or (baseline == "flash4" and not case.get("cap"))
    ):
        return "a negative scale makes NaN"
    return ""


def refuse(name: str, starts: tuple[Tensor, ...], softcap: float | None = None) -> None:
    if starts:
        raise UnavailableError(f"{name} takes no packed sequences")
    if softcap is not None:
        raise UnavailableError(f"{name} has no softcap")


def torch_sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *starts: Tensor,
    out: Any,
    scale: float,
    band: Band,
    softcap: float | None = None,
    from_end: bool = False,
) -> tuple[Tensor, None]:
    """By the kernel that PyTorch chooses, which does not tell the rows' logarithms.

    A band that is neither full nor causal is a mask of booleans.
    """
    refuse("scaled_dot_product_attention", starts, softcap)
    from torch.nn.functional import scaled_dot_product_attention

    given: dict[str, Any] = {}
    if not is_full(band, q, k):
        causal = is_causal(band, q)
        given = {"is_causal": True} if causal else {"attn_mask": visible(band, q.shape[2], k.shape[2], q.device)}
    return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=k.shape[1] != q.shape[1], **given), None


def pinned(name: str) -> Callable[..., tuple[Tensor, None]]:
    """The same by one of PyTorch's kernels, ``CUDNN_ATTENTION`` or ``FLASH_ATTENTION``, where that takes the call."""

    def sdpa(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *starts: Tensor,
        out: Any,
        scale: float,
        band: Band,
        softcap: float | None = None,
        from_end: bool = False,
    ) -> tuple[Tensor, None]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        refuse(name, starts, softcap)
        if not q.is_cuda:
            raise UnavailableError(f"{name} is for tensors on a GPU")
        if not (is_full(band, q, k) or is_causal(band, q)):
            raise UnavailableError(f"{name} takes no mask of booleans")
        if not all(map(is_aligned, (q, k, v))):  # flash's launch fails there
            raise UnavailableError(f"{name} takes rows that start at multiples of 16 bytes")
        with sdpa_kernel(getattr(SDPBackend, name)):
            try:
                return torch_sdpa(q, k, v, out=out, scale=scale, band=band)
            except RuntimeError as error:
                if "No available kernel" in str(error):
                    raise UnavailableError(f"{name} does not take these operands") from error
                raise

    return sdpa


def flex(mode: str = "default") -> Callable[..., Any]:
    """FlexAttention as torch.compile builds it in that mode, with a block mask that is made once for each size."""
    compiled = baselines.compiled_results(_flex, mode)

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *starts: Tensor,
        out: Any,
        scale: float,
        band: Band,
        softcap: float | None = None,
        from_end: bool = False,
    ) -> Any:
        refuse("FlexAttention", starts)
        if not q.is_cuda:
            raise UnavailableError("FlexAttention is compiled for a GPU alone")
        if 0 in (*q.shape, *k.shape):
            raise UnavailableError("FlexAttention takes no tensors without elements")
        if q.shape[3] < 16:
            raise UnavailableError("FlexAttention takes head dimensions from 16 on")
        blocks = None if is_full(band, q, k) else _blocks(band, q.shape[2], k.shape[2], q.device)
        return compiled(q, k, v, out=out, scale=scale, blocks=blocks, capped=_capped(softcap)), None

    return call


def _flex(q: Tensor, k: Tensor, v: Tensor, *, scale: float, blocks: Any, capped: Any) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    grouped = k.shape[1] != q.shape[1]
    return flex_attention(q, k, v, score_mod=capped, block_mask=blocks, scale=scale, enable_gqa=grouped)


@functools.lru_cache(64)
def _capped(cap: float | None) -> Callable[..., Tensor] | None:
    """The change of a score that FlexAttention is given for a softcap."""
    if cap is None:
        return None
    import torch

    return lambda score, b, h, query, key: cap * torch.tanh(score / cap)


@functools.lru_cache(64)
def _blocks(band: Band, queries: int, keys: int, on: device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    first, last = band

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= query + first) & (key <= query + last)

    return create_block_mask(sees, None, None, queries, keys, device=on)


def exemplar(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *starts: Tensor,
    out: Any,
    scale: float,
    band: Band,
    softcap: float | None = None,
    from_end: bool = False,
) -> tuple[Tensor, Tensor]:
    """PyTorch's result, and the logarithm of each row's sum from fp32 products.

    What scaled_dot_product_attention has no argument for, and what it makes NaN of, is multiplied head by head.
    """
    import torch

    result = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    group = q.shape[1] // max(1, k.shape[1])
    for queries, keys, limits in spans_of(q, k, starts, band, from_end):
        hidden = ~visible(limits, queries.stop - queries.start, keys.stop - keys.start, q.device)
        for b in range(q.shape[0]):
            for h in range(q.shape[1]):
                scores = q[b, h, queries].float() @ k[b, h // group, keys].float().t() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                scores.masked_fill_(hidden, -torch.inf)
                lse[b, h, queries] = scores.logsumexp(1)
                p = scores.softmax(1).masked_fill(hidden, 0.0).to(v.dtype)
                result[b, h, queries] = p @ v[b, h // group, keys]
    if not starts and softcap is None and scale >= 0 and k.shape[2] > 0:
        result, _ = torch_sdpa(q, k, v, out=None, scale=scale, band=band)
    return result, lse
