"""The last Triton step of attention: which calls v11 and v13, in Gluon, serve for it, and with which arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest

from kernel_twins.compiler import aot

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

Taken = list[dict[str, Any]]


def heads(*shape: int) -> Any:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def operands(d: int = 128, heads_first: bool = True) -> dict[str, Any]:
    """q of 4 heads, k and v of 2, and out."""
    sizes = {"q": (4, 129), "k": (2, 300), "v": (2, 300), "out": (4, 129)}
    if heads_first:
        return {name: heads(2, h, s, d) for name, (h, s) in sizes.items()}
    return {name: heads(2, s, h, d).transpose(1, 2) for name, (h, s) in sizes.items()}


def is_for_gluon(**changed: Any) -> bool:
    step = importlib.import_module("kernel_twins._triton.attention.attention.v14_dispatch")
    return bool(step.is_for_gluon(**{**operands(), **changed}))


@pytest.mark.parametrize("d", [8, 40, 64, 120, 128])
@pytest.mark.parametrize("heads_first", [True, False])
def test_a_plain_call_is_for_gluon(d: int, heads_first: bool) -> None:
    assert is_for_gluon(**operands(d, heads_first))


def test_a_tensor_with_one_head_or_one_row_may_say_any_stride_of_it() -> None:
    one = heads(2, 4, 1, 128)
    assert is_for_gluon(q=one, out=one, k=heads(2, 1, 300, 128).as_strided((2, 1, 300, 128), (38_400, 3, 128, 1)))


@pytest.mark.parametrize("d", [136, 192, 256])
def test_wide_heads_are_not(d: int) -> None:
    assert not is_for_gluon(**operands(d))


def test_capped_scores_and_packed_sequences_are_not() -> None:
    assert not is_for_gluon(softcap=2.0)
    assert not is_for_gluon(cu_seqlens_q=torch.tensor([0, 129]))


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda x: heads(*x.shape[:3], 131)[..., :128], id="rows 131 elements apart"),
        pytest.param(lambda x: heads(1, *x.shape[1:]).expand(x.shape), id="one batch, expanded"),
        pytest.param(lambda x: heads(2, 1, *x.shape[2:]).expand(x.shape), id="one head, expanded"),
        pytest.param(lambda x: x.as_strided(x.shape, (*x.stride()[:2], 64, 1)), id="rows that overlap"),
        pytest.param(lambda x: x.as_strided(x.shape, (2**39, *x.stride()[1:])), id="batches 2^40 bytes apart"),
    ],
)
def test_tensors_that_its_descriptors_do_not_take_are_not(name: str, view: Callable[[Any], Any]) -> None:
    assert not is_for_gluon(**{name: view(operands()[name])})


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_tensors_that_start_between_multiples_of_16_bytes_are_not(name: str) -> None:
    shape = operands()[name].shape
    memory = torch.empty(shape.numel() + 8, dtype=torch.bfloat16)
    first = -memory.data_ptr() % 16 // 2
    for offset, taken in ((first, True), (first + 1, False), (first + 4, False)):
        assert is_for_gluon(**{name: memory[offset:][: shape.numel()].view(shape)}) == taken


def test_more_tiles_than_it_counts_are_not() -> None:
    q, k = heads(2**15, 2**15, 1, 8), heads(2**15, 1, 5, 8)
    assert not is_for_gluon(q=q, k=k, v=k, out=q)


# ----------------------------------------------------------------------------------------------------------------------
# Where Gluon runs
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "version", "interpreted", "runs"),
    [
        (90, "3.6.0", False, True),
        (90, "3.6.1+git1234567", False, True),
        (80, "3.6.0", False, False),
        (100, "3.6.0", False, False),
        (120, "3.6.0", False, False),
        (90, "3.5.1", False, False),
        (90, "3.7.0", False, False),
        (90, "3.60.0", False, False),
        (90, "3.6.0", True, False),
    ],
)
def test_gluon_runs_on_one_architecture_by_one_minor_version(
    monkeypatch: pytest.MonkeyPatch, arch: int, version: str, interpreted: bool, runs: bool
) -> None:
    device = importlib.import_module("kernel_twins._triton.lib.device")
    on(monkeypatch, arch)
    monkeypatch.setattr(triton, "__version__", version)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpreted
        assert device.runs_gluon() == runs


def on(monkeypatch: pytest.MonkeyPatch, arch: int) -> None:
    """Has Triton find a GPU of that architecture."""
    monkeypatch.setattr(triton.runtime.driver, "_active", aot._Driver(arch))


# ----------------------------------------------------------------------------------------------------------------------
# What is launched
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """On a GPU of 9.0: the arguments of Gluon's launches and whose they are, and {} for each of the own kernel."""
    v14 = importlib.import_module("kernel_twins._triton.attention.attention.v14_dispatch")
    taken: Taken = []
    on(monkeypatch, 90)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(triton, "__version__", "3.6.0")

    def first_launch_of(step: str) -> Callable[..., None]:
        def first_launch(q: Any, k: Any, v: Any, out: Any, lse: Any, scale: Any, band: Any) -> None:
            taken.append({"step": step, "scale": scale, "band": band})

        return first_launch

    for step in ("v11_skip_rescale", "v13_late_search"):
        module = importlib.import_module(f"kernel_twins._triton.attention.attention.{step}")
        monkeypatch.setattr(module, "first_launch", first_launch_of(step))
    own = MagicMock()
    own.__getitem__.return_value = lambda *args, **constants: taken.append({})
    monkeypatch.setattr(v14.tuning, "choose", lambda *_: (own, {}))
    return taken


def call(**options: Any) -> None:
    step = importlib.import_module("kernel_twins._triton.attention.attention.v14_dispatch")
    q, k, v, out = operands(options.pop("d", 128)).values()
    step.attention_v14_dispatch(q, k, v, out=(out, torch.empty(q.shape[:3], device="meta")), **options)


def test_gluon_gets_the_band_from_the_first_key_on(launched: Taken) -> None:
    """Of 129 queries and 300 keys."""
    call(scale=-0.25)
    call(band=(-(2**31), 0))
    call(band=(-(2**31), 0), from_end=True)
    call(band=(-7, 9), from_end=True)
    call(from_end=True)
    assert [each["band"] for each in launched] == [None, (-(2**31), 0), (171 - 2**31, 171), (164, 180), None]
    assert [each["scale"] for each in launched] == [-0.25, None, None, None, None]


@pytest.mark.parametrize(
    ("d", "step"),
    [(8, "v11_skip_rescale"), (64, "v11_skip_rescale"), (72, "v13_late_search"), (128, "v13_late_search")],
)
def test_narrow_heads_go_to_v11(launched: Taken, d: int, step: str) -> None:
    call(d=d)
    assert [each["step"] for each in launched] == [step]


def test_what_gluon_does_not_serve_the_steps_own_kernel_does(launched: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    call(d=256)
    call(softcap=2.0)
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    call()
    assert launched == [{}, {}, {}]
