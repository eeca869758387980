"""``out = softmax(scale * q @ k^T + mask) @ v`` of every head; sums in fp32, probabilities rounded to v's dtype."""

from __future__ import annotations

from kernel_twins.ops import ptx
from kernel_twins.ops.attention import reference, sdpa, shared
from kernel_twins.ops.attention.flash4 import flash4
from kernel_twins.spec import Case, Drawn, Op, Prediction, Step
from kernel_twins.spec.chance import Draws

_NONE_HIDDEN = "Gluon's blocks of 128 queries have one tile of keys at the diagonal, and both consumers see it."
_THREE_CONSUMERS_GAP = "In 160 registers a thread Gluon's v11 would spill; its v10 goes on from v08's two consumers."
_GLUON = (ptx.WGMMA_FROM_REGISTERS, ptx.TMA_LOAD, ptx.BARRIER_WAIT, ptx.MORE_REGISTERS)

_FULL = Case.of(2, 16, 8_192, 128, dtype="bf16")
_CAUSAL = _FULL.but(mask="causal")
_WIDE = Case.of(2, 8, 8_192, 256, dtype="bf16")
_SHORT_CAUSAL = Case.of(8, 16, 2_048, 128, dtype="bf16", mask="causal")


def _test_cases() -> tuple[Case, ...]:
    """One query and one key, borders of tiles and their neighbours, every kind of band, of heads and of layout.

    The last ones have more tiles than a GPU has SMs, so that blocks which stay take several.
    """
    sizes: tuple[tuple[int, int, int, int, dict[str, str]], ...] = (
        (1, 1, 1, 64, {}),
        (2, 3, 64, 64, {}),
        (1, 2, 128, 128, {}),
        (2, 2, 129, 128, {"keys": "1"}),
        (1, 2, 1, 128, {"keys": "257"}),
        (2, 1, 63, 64, {"keys": "65"}),
        (1, 2, 200, 40, {"keys": "131"}),
        (1, 3, 67, 8, {"keys": "190"}),
        (1, 1, 300, 120, {"keys": "300"}),
        (1, 2, 0, 64, {"keys": "5"}),
        (2, 2, 70, 64, {"keys": "0"}),
        (0, 2, 7, 64, {}),
        (1, 2, 193, 128, {"mask": "causal"}),
        (2, 2, 130, 64, {"mask": "causal", "keys": "259"}),
        (1, 2, 259, 64, {"mask": "causal", "keys": "130"}),
        (1, 2, 384, 64, {"mask": "causal", "keys": "447"}),  # a tile's first row sees none of the edge's tiles
        (1, 2, 384, 128, {"mask": "causal", "keys": "447"}),
        (1, 2, 259, 128, {"mask": "top", "keys": "130"}),
        (1, 2, 130, 128, {"mask": "top", "keys": "259"}),
        (1, 2, 320, 64, {"window": "64_0"}),
        (1, 2, 257, 128, {"window": "3_70", "keys": "300"}),
        (1, 1, 200, 64, {"window": "0_0", "keys": "100"}),
        (1, 4, 100, 64, {"kv": "1"}),
        (2, 6, 150, 128, {"kv": "2", "mask": "causal"}),
        (1, 2, 150, 64, {"scale": "neg"}),
        (1, 2, 150, 128, {"scale": "neg", "mask": "causal"}),
        (1, 2, 150, 64, {"scale": "small"}),
        (2, 3, 140, 128, {"layout": "bshd", "mask": "causal"}),
        (2, 2, 77, 64, {"layout": "pitched"}),
        (2, 2, 77, 64, {"offset": "1"}),
        (1, 2, 150, 64, {"values": "nan", "mask": "causal"}),
        (1, 2, 70, 136, {"keys": "90"}),
        (1, 2, 200, 256, {"mask": "causal", "keys": "333"}),
        (2, 2, 129, 256, {"window": "40_9", "kv": "1", "layout": "bshd"}),
        (1, 2, 150, 256, {"scale": "neg"}),
        (1, 2, 200, 64, {"cap": "2"}),
        (1, 2, 130, 128, {"cap": "0.5", "mask": "causal", "scale": "neg"}),
        (1, 1, 150, 192, {"cap": "1000", "keys": "81"}),
        (7, 2, 140, 64, {"packed": "yes"}),
        (9, 4, 400, 128, {"packed": "yes", "mask": "causal", "kv": "2"}),
        (6, 2, 300, 128, {"packed": "yes", "keys": "170", "mask": "causal"}),
        (5, 2, 90, 256, {"packed": "yes", "keys": "210", "mask": "top"}),
        (6, 1, 350, 64, {"packed": "yes", "window": "30_5", "cap": "3", "scale": "neg"}),
        (1, 140, 200, 64, {"keys": "700"}),
        (1, 140, 200, 128, {"keys": "330", "mask": "causal"}),
        (2, 70, 330, 64, {"keys": "200", "mask": "causal"}),
        (1, 140, 150, 256, {"keys": "200", "mask": "causal"}),
        (40, 8, 260, 128, {"packed": "yes", "mask": "causal"}),
    )
    return tuple(
        Case.of(b, h, s, d, dtype=dtype, **variant) for dtype in ("bf16", "fp16") for b, h, s, d, variant in sizes
    )


def _draw(draws: Draws) -> Drawn:
    """Batches, heads and lengths of models; keys as many as queries if causal, so that everybody aligns them alike."""
    d, group = draws.deal("d", (64, 128, 128)), draws.deal("group", (1, 4, 8))
    kv_heads, mask = draws.number(1, 16), draws.deal("mask", ("", "causal"))
    queries = draws.size(128, 16_384)
    variant = {"mask": mask} if mask else {}
    if not mask and draws.deal("keys", ("queries", "others")) == "others":
        variant["keys"] = str(draws.size(128, 16_384))
    if group > 1:
        variant["kv"] = str(kv_heads)
    shape = draws.number(1, 16), kv_heads * group, queries, d
    return Drawn(Case.of(*shape, dtype=draws.deal("dtype", ("bf16", "fp16")), **variant))


# Many queries, then many keys. The other side is short, so that float64's scores take little time, and D leaves them to
# the last steps, since each step takes seconds.
_HUGE_CASES = (
    Case.of(32, 1, 2**18 + 1, 256, dtype="bf16", keys="16", cap="2"),
    Case.of(32, 1, 16, 256, dtype="bf16", keys=str(2**18 + 1), cap="2"),
)

_SHAPES = shared.shapes(128, 64, 256)
_HEADLINES = tuple(case for case in _SHAPES if case.shape[2] in (2_048, 8_192))
_BENCH_CASES = tuple(case for case in _HEADLINES if case.shape[2] == 8_192)

OP = Op(
    name="attention",
    family="attention",
    chapter=18,
    title="Attention",
    summary="`out = softmax(scale q k^T) v`. Two products with a softmax between them, none of which memory may hold.",
    rounds="Exponentials are rounded to v's dtype before they are multiplied by v.",
    deviation=reference.deviation,
    inputs=shared.inputs,
    hostile=True,
    outputs=shared.outputs,
    reference=reference.reference,
    more_references=(reference.lse_reference,),
    check=shared.check,
    accepts=shared.accepts,
    options=shared.options,
    test_cases=_test_cases(),
    huge_cases=_HUGE_CASES,
    bench_cases=_BENCH_CASES,
    wide_cases=tuple(case for case in _SHAPES if case not in _BENCH_CASES),
    headline_cases=_HEADLINES,
    size_axis=shared.SIZE_AXIS,
    profile_case=_FULL,
    ceiling="bf16",
    flops=shared.flops,
    bytes=shared.minimum_bytes,
    baselines={
        "torch": sdpa.torch_sdpa,
        "cudnn": sdpa.pinned("CUDNN_ATTENTION"),
        "flash": sdpa.pinned("FLASH_ATTENTION"),
        "flash4": flash4,
        "compile": sdpa.flex(),
        "max_autotune": sdpa.flex("max-autotune-no-cudagraphs"),
    },
    baseline_cases={"max_autotune": (_FULL, _CAUSAL)},
    differs=sdpa.differs,
    exemplar=sdpa.exemplar,
    draw=_draw,
    behind={"cuda": ("v14_dispatch",), "triton": ("v14_dispatch",)},
    steps=(
        Step(
            name="v01_one_query",
            predictions=(
                Prediction("tensor_pipe", "<=", 0.1),
                Prediction("ceiling_share", "<=", 2),
            ),
            accepts=shared.plain,
        ),
        Step(
            name="v02_tensor_cores",
            predictions=(
                Prediction("time", "<=", 0.06, relative=True),
                Prediction("tensor_pipe", ">=", 15),
                Prediction("bank_conflicts", "<=", 3, backends=("cuda",)),
            ),
            accepts=shared.plain,
            promises={80: (ptx.MMA,), 90: (ptx.WGMMA_FROM_REGISTERS,)},
        ),
        Step(
            name="v03_exp2",
            predictions=(
                Prediction("instructions", "<=", 0.92, relative=True),
                Prediction("time", "<=", 0.97, relative=True),
                Prediction("time", "<=", 0.6, relative=True, case=_CAUSAL),
            ),
            accepts=shared.plain,
            promises={80: (ptx.MMA,), 90: (ptx.WGMMA_FROM_REGISTERS,)},
        ),
        Step(
            name="v04_pipelined",
            predictions=(
                Prediction("time", "<=", 0.8, relative=True),
                Prediction("tensor_pipe", ">=", 35),
            ),
            accepts=shared.plain,
            promises={80: (ptx.COPY_16_BYTES, ptx.MMA), 90: (ptx.COPY_16_BYTES, ptx.WGMMA_FROM_REGISTERS)},
            spills=(80,),
        ),
        Step(
            name="v05_tma",
            predictions=(
                Prediction("time", "<=", 0.6, relative=True, backends=("cuda",)),
                Prediction("tensor_pipe", ">=", 55, backends=("cuda",)),
                Prediction("instructions", "<=", 0.5, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 1.0, relative=True, backends=("triton",)),
            ),
            arch="==9.0a",
            accepts=shared.plain_copyable,
            promises={90: (ptx.WGMMA_FROM_REGISTERS, ptx.TMA_LOAD)},
        ),
        Step(
            name="v06_warp_specialized",
            predictions=(
                Prediction("time", "==", 0.99, relative=True, tolerance=0.04, backends=("cuda",)),
                Prediction("instructions", "==", 1.0, relative=True, tolerance=0.05, backends=("cuda",)),
                Prediction("time", "<=", 0.97, relative=True, backends=("triton",)),
            ),
            arch="==9.0a",
            accepts=shared.plain_copyable,
            promises={90: _GLUON},
        ),
        Step(
            name="v07_ping_pong",
            predictions=(
                Prediction("time", "<=", 0.92, relative=True, backends=("cuda",)),
                Prediction("tensor_pipe", ">=", 65, backends=("cuda",)),
                Prediction("time", "<=", 0.95, relative=True, backends=("triton",)),
                Prediction("tensor_pipe", ">=", 62, backends=("triton",)),
            ),
            arch="==9.0a",
            accepts=shared.plain_copyable,
            promises={90: _GLUON},
        ),
        Step(
            name="v08_overlapped",
            predictions=(
                Prediction("time", "==", 1.01, relative=True, tolerance=0.03),
                Prediction("instructions", "==", 1.0, relative=True, tolerance=0.03),
            ),
            arch="==9.0a",
            accepts=shared.plain_copyable,
            promises={90: _GLUON},
        ),
        Step(
            name="v09_three_consumers",
            predictions=(
                Prediction("time", "<=", 0.98, relative=True),
                Prediction("l2_bytes", "==", 0.67, relative=True, tolerance=0.1),
            ),
            no_triton=_THREE_CONSUMERS_GAP,
            arch="==9.0a",
            accepts=shared.plain_copyable,
        ),
        Step(
            name="v10_persistent",
            predictions=(
                Prediction("time", "==", 1.01, relative=True, tolerance=0.03, backends=("cuda",)),
                Prediction("time", "<=", 0.97, relative=True, case=_CAUSAL),
                Prediction("time", "<=", 0.97, relative=True, backends=("triton",)),
            ),
            arch="==9.0a",
            accepts=shared.plain_copyable,
            promises={90: (*_GLUON, ptx.TMA_STORE)},
        ),
        Step(
            name="v11_skip_rescale",
            predictions=(
                Prediction("instructions", "<=", 0.92, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 0.99, relative=True, backends=("cuda",)),
                Prediction("instructions", "<=", 0.97, relative=True, backends=("triton",)),
                Prediction("time", "<=", 0.97, relative=True, backends=("triton",)),
            ),
            arch="==9.0a",
            accepts=shared.plain_copyable,
            promises={90: (*_GLUON, ptx.TMA_STORE)},
            wide=True,
        ),
        Step(
            name="v12_skip_hidden",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02),
                Prediction("time", "<=", 0.995, relative=True, case=_CAUSAL),
                Prediction("time", "<=", 0.97, relative=True, case=_SHORT_CAUSAL),
            ),
            no_triton=_NONE_HIDDEN,
            arch="==9.0a",
            accepts=shared.plain_copyable,
            wide=True,
        ),
        Step(
            name="v13_late_search",
            predictions=(
                Prediction("instructions", "<=", 0.9, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 0.93, relative=True, backends=("cuda",)),
                Prediction("time", "<=", 0.93, relative=True, case=_CAUSAL, backends=("cuda",)),
                Prediction("instructions", "<=", 0.92, relative=True, backends=("triton",)),
                Prediction("time", "<=", 0.97, relative=True, backends=("triton",)),
            ),
            arch="==9.0a",
            accepts=shared.plain_copyable,
            promises={90: (*_GLUON, ptx.TMA_STORE)},
            wide=True,
        ),
        Step(
            name="v14_dispatch",
            predictions=(
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02, backends=("cuda",)),
                Prediction("time", "==", 1.0, relative=True, tolerance=0.02, case=_FULL, backends=("triton",)),
            ),
            arch="==9.0a",
            accepts=shared.copyable,
            profile_case={"triton": _WIDE},
            wide=True,
            promises={90: (ptx.WGMMA_FROM_REGISTERS, ptx.TMA_LOAD)},
        ),
    ),
)
