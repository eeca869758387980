"""FlashAttention-4 is asked for what a case of attention is."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402

from kernel_twins import OPS  # noqa: E402
from kernel_twins.errors import UnavailableError  # noqa: E402
from kernel_twins.harness.check import generator  # noqa: E402
from kernel_twins.ops.attention import flash4, shared  # noqa: E402
from kernel_twins.ops.attention.reference import visible  # noqa: E402
from kernel_twins.spec import Case  # noqa: E402

OP = OPS["attention"]


def seen_through(window: tuple[int | None, int | None], queries: int, keys: int) -> Any:
    """[Sq, Sk], true where FlashAttention's window, whose last query's own key is the last one, lets a query see."""
    before, behind = (keys + queries if each is None else each for each in window)
    own = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    return (key >= own - before) & (key <= own + behind)


@pytest.mark.parametrize("case", [case for case in OP.test_cases if not case.get("packed") and case.dtype == "bf16"])
def test_flash4_is_given_the_window_of_the_band(case: Case) -> None:
    queries, keys, band = case.shape[2], shared.keys_of(case), OP.options(case)["band"]
    window = flash4.window_of(band, queries, keys, from_end=False)
    assert torch.equal(seen_through(window, queries, keys), visible(band, queries, keys, torch.device("cpu")))
    shifted = (band[0] - keys + queries, band[1] - keys + queries)
    assert flash4.window_of(shifted, queries, keys, from_end=True) == window


@pytest.mark.parametrize(("mask", "window"), [("", (None, None)), ("causal", (None, 0))])
def test_flash4_has_kernels_of_its_own_for_full_and_causal_attention(mask: str, window: tuple[int | None, ...]) -> None:
    for queries, keys in ((300, 300), (300, 170), (170, 300)):
        assert flash4.window_of(shared.band_of(mask, None, queries, keys), queries, keys, from_end=False) == window


class OnGpu(Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(("slug", "softcap"), [("2x6x9x64-bf16-kv.2-mask.causal", 0.0), ("1x2x5x8-fp16-cap.2", 2.0)])
def test_flash4_is_given_heads_behind_rows_and_gives_them_back(
    slug: str, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case.parse(slug)
    q, k, v = (each.as_subclass(OnGpu) for each in OP.inputs(case, generator(case, "cpu")))
    lse = torch.zeros(case.shape[:3])

    def flash_attn_func(*given: Any, **options: Any) -> Any:
        for each, whole in zip(given, (q, k, v), strict=True):
            assert torch.equal(each, whole.transpose(1, 2))
        assert options["softmax_scale"] == OP.options(case)["scale"]
        assert options["softcap"] == softcap and options["return_lse"]
        return given[0], lse

    module = SimpleNamespace(flash_attn_func=flash_attn_func)
    monkeypatch.setattr(importlib, "import_module", lambda name: {"flash_attn.cute": module}[name])
    result, told = flash4.flash4(q, k, v, out=None, **OP.options(case))
    assert torch.equal(result, q) and told is lse


def test_flash4_says_what_it_is_not_for_and_how_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    case = Case.parse("1x1x8x64-bf16")
    inputs, options = OP.inputs(case, generator(case, "cpu")), OP.options(case)
    with pytest.raises(UnavailableError, match="for tensors on a GPU"):
        flash4.flash4(*inputs, out=None, **options)
    inputs = tuple(each.as_subclass(OnGpu) for each in inputs)
    with pytest.raises(UnavailableError, match="pip install flash-attn-4=="):
        flash4.flash4(*inputs, out=None, **options)
    with pytest.raises(UnavailableError, match="sequences of one length"):
        flash4.flash4(*inputs, torch.zeros(2), torch.zeros(2), out=None, **options)
