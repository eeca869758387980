"""What the Triton side's gradient of attention asks a step for, on tensors of the CPU and without kernels."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernel_twins.functional.attention.shared import Options  # noqa: E402
from tests.attention_reference import SUBSETS, operands, starts, tokens  # noqa: E402


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The calls of a step that writes 1, 2 and 3 into the gradients of q, k and v."""
    gradient = importlib.import_module("kernel_twins.functional.attention.gradient")
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def step(*given: Any, out: tuple[Any, ...], **options: Any) -> None:
        calls.append((given, options))
        for value, each in enumerate(out, 1):
            if each is not None:
                each.fill_(value)

    monkeypatch.setattr(gradient, "_has_step", lambda q: True)
    monkeypatch.setattr(gradient, "triton_launcher", lambda op, device: step)
    return calls


def backward(*given: Any) -> tuple[Any, Any, Any]:
    triton_attention = importlib.import_module("kernel_twins.functional.attention.triton_attention")
    return triton_attention.backward_operator(*given)


@pytest.mark.parametrize("wanted", SUBSETS)
def test_a_step_makes_the_gradients_that_are_wanted_alone(asked, wanted) -> None:
    q, k, v = operands(dtype=torch.float16)
    found = backward(q, None, q, k, v, q, q.new_zeros(q.shape[:3]).float(), None, None, *Options(), *wanted)
    for value, each, like, is_wanted in zip((1, 2, 3), found, (q, k, v), wanted, strict=True):
        assert each.shape == (like.shape if is_wanted else (0,))
        assert each.eq(value).all()
    assert len(asked) == any(wanted)


def test_a_step_gets_what_it_can_read(asked) -> None:
    """Rows that start at multiples of 16 bytes, of a gradient that is seen as more, too; numbers without gaps."""
    q, k, v = operands(dtype=torch.float16)
    odd = torch.zeros(*q.shape[:3], q.shape[3] + 1, dtype=q.dtype)[..., 1:]
    lse = torch.zeros(*q.shape[:3], 2)[..., 0]
    backward(q[:1, :1, :1].expand(q.shape), lse, odd, k, v, odd, lse, None, None, *Options(softcap=2.0, first=-3))
    (((dout, *heads, sums, dsums, starts_q, starts_k), options),) = asked
    assert dout.stride()[:3] == (0, 0, 0)
    assert all(each.data_ptr() % 16 == 0 and each.stride(3) == 1 for each in heads)
    assert sums.is_contiguous()
    assert dsums.is_contiguous()
    assert (starts_q, starts_k) == (None, None)
    assert options == {
        "scale": None, "band": (-3, Options().last), "softcap": 2.0, "from_end": False, "deterministic": False,
    }  # fmt: skip


def test_a_step_gets_where_sequences_start(asked) -> None:
    q, k, v = (each.transpose(0, 1)[None] for each in tokens(torch.float16))
    backward(q, None, q, k, v, q, torch.zeros(q.shape[:3]), *starts(), *Options(from_end=True, deterministic=True))
    ((given, options),) = asked
    assert all(map(torch.equal, given[-2:], starts()))
    assert (options["from_end"], options["deterministic"]) == (True, True)
