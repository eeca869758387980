"""``attention`` and ``scaled_dot_product_attention`` as they are timed beside PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kernel_twins
from kernel_twins import OPS
from kernel_twins.functional import contests
from kernel_twins.functional.attention.attention import _choose
from kernel_twins.functional.attention.shared import Options, options_of
from kernel_twins.functional.attention.torch_attention import sdpa
from kernel_twins.functional.sampled import Calls, Forward, Operands
from kernel_twins.ops.tensors import DTYPE
from kernel_twins.spec import Case, Op

# ----------------------------------------------------------------------------------------------------------------------
# Chosen cases
# ----------------------------------------------------------------------------------------------------------------------


def _contests() -> Iterator[contests.Contest]:
    for grad in (False, True):
        case = Case.of(2, 4, 64, 64, dtype="bf16", **({"grad": "yes"} if grad else {}))
        yield contests.host("attention", case, sdpa, contests.by_backend(kernel_twins.attention), _operands(case, grad))
    for mask in ({}, {"mask": "causal"}):
        case = Case.of(2, 16, 8_192, 128, dtype="bf16", **mask)
        causal = bool(mask)
        ours = contests.by_backend(kernel_twins.attention, causal=causal)
        yield contests.forward("attention", case, partial(sdpa, is_causal=causal), ours, _operands(case, False))


def _operands(case: Case, grad: bool) -> Operands:
    """q, k and v, standard normal."""
    source = torch.Generator("cuda").manual_seed(0)

    def normal() -> Tensor:
        values = torch.randn(case.shape, generator=source, device="cuda")
        return values.to(DTYPE[case.dtype]).requires_grad_(grad)

    return normal(), normal(), normal()


CONTESTS = {"attention": _contests}

# ----------------------------------------------------------------------------------------------------------------------
# Sampled cases
# ----------------------------------------------------------------------------------------------------------------------


def _attention(case: Case) -> Calls:
    causal = case.get("mask") == "causal"
    return _calls(case, partial(kernel_twins.attention, causal=causal), options_of(causal, None, None, None, None))


def _sdpa(case: Case) -> Calls:
    causal, grouped = case.get("mask") == "causal", bool(case.get("kv"))
    ours = partial(kernel_twins.scaled_dot_product_attention, is_causal=causal, enable_gqa=grouped)
    return _calls(case, ours, options_of("top-left" if causal else None, None, None, None, None))


def _calls(case: Case, ours: Any, options: Options) -> Calls:
    return Calls(
        eager=partial(sdpa, is_causal=case.get("mask") == "causal", enable_gqa=bool(case.get("kv"))),
        ours=ours,
        chosen=partial(_choose, options=options),
        forward=partial(Forward, _without_lse(OPS["attention"]), case),
    )


def _without_lse(op: Op) -> Op:
    """The operation with the one output that both functions return."""
    torch_call = op.exemplar
    assert torch_call is not None

    def exemplar(*inputs: Tensor, **arguments: Any) -> Operands:
        return (torch_call(*inputs, **arguments)[0],)

    return replace(op, exemplar=exemplar, more_references=(), outputs=lambda case: op.outputs(case)[:1])


CALLS = {"attention": _attention, "scaled_dot_product_attention": _sdpa}
