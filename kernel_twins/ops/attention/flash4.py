"""FlashAttention-4, written in CuTe DSL, as a baseline of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_twins.errors import UnavailableError
from kernel_twins.ops.attention.shared import Band
from kernel_twins.ops.baselines import imported

if TYPE_CHECKING:
    from torch import Tensor


def window_of(band: Band, queries: int, keys: int, from_end: bool) -> tuple[int | None, int | None]:
    """The keys before and behind a query's own that it sees, the last query's own being the last key; None is all."""
    aligned = 0 if from_end else keys - queries
    before, behind = aligned - band[0], band[1] - aligned
    return (None if before >= keys - 1 else before), (None if behind >= queries - 1 else behind)


def flash4(
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
    """By flash-attn-4's interface, which itself repacks rows that do not start at multiples of 16 bytes.

    UnavailableError off the GPU, for packed sequences, and where flash-attn-4 is not installed.
    """
    if not q.is_cuda:
        raise UnavailableError("FlashAttention-4 is for tensors on a GPU")
    if starts:
        raise UnavailableError("FlashAttention-4 is called for sequences of one length alone")
    try:
        module = imported("flash_attn.cute")
    except ImportError as error:
        raise UnavailableError("flash-attn-4 is not installed: pip install flash-attn-4==4.0.0b36") from error
    result, lse = module.flash_attn_func(
        *(each.transpose(1, 2) for each in (q, k, v)),
        softmax_scale=scale,
        window_size=window_of(band, q.shape[2], k.shape[2], from_end),
        softcap=softcap or 0.0,
        return_lse=True,
    )
    return result.transpose(1, 2), lse
