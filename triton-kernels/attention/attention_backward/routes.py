"""Which calls of attention's gradient the steps in Gluon serve for the last one, and which step."""

from __future__ import annotations

from collections.abc import Callable

import triton
from torch import Tensor

from kernel_twins._triton.attention.attention_backward.delta import PITCH
from kernel_twins._triton.attention.attention_backward.rounding import PACK

MOST_ROWS = 2**31  # of lse and delta, over all heads: they are counted in 32 bits


def is_for_gluon(
    q: Tensor,
    out: tuple[Tensor | None, Tensor | None, Tensor | None],
    cu_seqlens_q: Tensor | None = None,
    softcap: float | None = None,
    deterministic: bool = False,
) -> bool:
    """Whether v06 and v07 serve a call, where Gluon runs; its operands must be such as v10 takes.

    D is up to 128, sequences have one length, there is no softcap, dq may be added in any order, and all gradients are
    wanted, in rows that start at multiples of 8 elements.
    """
    B, H, Sq, D = q.shape
    if cu_seqlens_q is not None or softcap is not None or deterministic or D > 128:
        return False
    return B * H * triton.cdiv(Sq, PITCH) * PITCH < MOST_ROWS and all(_is_aligned(each) for each in out)


def _is_aligned(gradient: Tensor | None) -> bool:
    return gradient is not None and not any(
        stride % PACK.value for size, stride in zip(gradient.shape[:3], gradient.stride()[:3], strict=True) if size > 1
    )


def gluon_step(D: int) -> Callable[..., None]:
    """v07 for narrow heads, else v06. Imported only here, since another version of Gluon may not have the modules."""
    if D > 64:
        from kernel_twins._triton.attention.attention_backward.v06_overlapped import (
            attention_backward_v06_overlapped as step,
        )
    else:
        from kernel_twins._triton.attention.attention_backward.v07_register_reduction import (
            attention_backward_v07_register_reduction as step,
        )
    return step
