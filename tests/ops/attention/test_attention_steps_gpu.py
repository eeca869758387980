"""Attention's steps on a GPU: the last ones keep FlashAttention's rule and give the same bits a thousand times.

The first ones know their limits.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_twins import OPS, load  # noqa: E402
from kernel_twins.harness.check import generator  # noqa: E402
from kernel_twins.ops.tensors import empty_outputs  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402
from tests.attention_reference import attend, sees  # noqa: E402

pytestmark = pytest.mark.gpu

OP = OPS["attention"]
CALLS = 1_000
PLAIN = ("v01_one_query", "v02_tensor_cores", "v03_exp2", "v04_pipelined")


@pytest.mark.parametrize(
    "slug",
    [
        "1x140x200x128-bf16-keys.330-mask.causal",  # more tiles than SMs, so that blocks draw several
        "1x140x150x256-bf16-keys.200-mask.causal",
        "40x8x260x128-bf16-mask.causal-packed.yes",
        "2x6x150x128-bf16-kv.2-mask.causal",
        "1x2x200x64-bf16-cap.2",
    ],
)
def test_the_last_step_gives_the_same_bits_in_a_thousand_calls(slug: str) -> None:
    step, case = OP.steps_of("cuda")[-1], Case.parse(slug)
    if not step.runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"{step.name} needs compute capability {step.arch}")
    call, inputs, options = load(OP.name, step.name, "cuda"), OP.inputs(case, generator(case, "cuda")), OP.options(case)
    first, again = (empty_outputs(OP, case, "cuda") for _ in range(2))
    call(*inputs, **options, out=first)
    unlike = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(CALLS):
        for each in again:
            each.fill_(math.nan)
        call(*inputs, **options, out=again)
        for each, before in zip(again, first, strict=True):
            unlike += (each != before).sum()  # NaN differs, too
    assert unlike.item() == 0


def attend_in_half(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Every operation rounds to the operands' dtype."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    hidden = ~sees(q.shape[2], k.shape[2], causal, None).to(q.device)
    scores = (q @ (k * q.shape[3] ** -0.5).mT).masked_fill(hidden, -math.inf)
    return torch.softmax(scores, 3).masked_fill(hidden.all(1)[:, None], 0.0) @ v


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [40, 64, 128, 192, 256])
@pytest.mark.parametrize(("queries", "keys"), [(113, 203), (384, 256), (640, 128), (1024, 1023)], ids=str)
def test_errors_keep_flash_attentions_rule(backend, dtype, causal, d, queries, keys) -> None:
    """At most twice the errors of the same formula in half precision (flash-attention, tests/cute/test_flash_attn.py).

    Twice the rounding of a number about 0.3 comes on top, for results that half precision hits by chance.
    """
    step = OP.steps_of(backend)[-1]
    if not step.runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"{step.name} needs compute capability {step.arch}")
    source = torch.Generator("cuda").manual_seed(d + keys)
    q, k, v = (
        torch.randn(2, heads, rows, d, generator=source, dtype=dtype, device="cuda")
        for heads, rows in ((4, queries), (2, keys), (2, keys))
    )
    out = torch.full_like(q, math.nan), torch.empty(q.shape[:3], device="cuda")
    shift = keys - queries
    band = (-queries, shift) if causal else None  # the last query sees the last key
    load(OP.name, step.name, backend)(q, k, v, out=out, band=band)
    right = attend(q, k, v, causal=causal)[0].to(dtype)
    error, allowed = (
        (each.double() - right.double()).abs().max() for each in (out[0], attend_in_half(q, k, v, causal))
    )
    assert error <= 2 * allowed + 2 * (right + 0.3 - 0.3 - right).abs().max()


@pytest.mark.parametrize("step", PLAIN)
def test_heads_wider_than_a_steps_tiles_are_refused(step: str) -> None:
    case = Case.parse("1x1x8x136-bf16")
    with pytest.raises(RuntimeError, match="D is 136, must be at most 128: take v14_dispatch"):
        load(OP.name, step, "cuda")(*OP.inputs(case, generator(case, "cuda")), out=empty_outputs(OP, case, "cuda"))


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("step", PLAIN)
def test_more_blocks_than_a_grid_has_are_refused(step: str) -> None:
    """A query of 8 elements in each of 2^31 heads; of queries and keys, none is in memory more than once."""
    batch, heads = 2**16, 2**15
    q = torch.ones(8, dtype=torch.bfloat16, device="cuda").expand(batch, heads, 1, 8)
    k = torch.empty(batch, 1, 0, 8, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(q.shape, dtype=torch.bfloat16, device="cuda"), torch.empty(q.shape[:3], device="cuda")
    with pytest.raises(RuntimeError, match="take 2147483648 blocks, a grid has fewer than 2\\^31: split the batch"):
        load(OP.name, step, "cuda")(q, k, k, out=out)
