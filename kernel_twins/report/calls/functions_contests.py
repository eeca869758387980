"""What is timed of the public functions: calls in every backend, and what they must give."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import kernel_twins
from kernel_twins.ops.activations import ACTIVATIONS
from kernel_twins.ops.tensors import DTYPE
from kernel_twins.spec import Case

Function = Callable[..., Tensor]
Result = Tensor | tuple[Tensor, ...]  # out, or out and the operands' gradients

OURS = ("cuda", "triton", "auto")
_SOFTMAX = partial(functional.softmax, dim=-1)
_NORMS = ("layer_norm", "rms_norm")
_REDUCTIONS = ("sum", "mean", "amax", "argmax")


@dataclass(frozen=True, slots=True)
class Contest:
    """One call in every backend, the way it is timed, and what it must give, in fp32: the result, then gradients.

    Of kind ``backward``, a call is a forward pass that gives the backward pass to be timed, and ``judged`` has both in
    one. Where a call's result is random, ``judged`` has the one that must give it.
    """

    kind: str
    function: str
    case: Case
    calls: Mapping[str, Callable[[], Any]]
    expected: tuple[Tensor, ...]
    judged: Mapping[str, Callable[[], Result]] = field(default_factory=dict)


def contests() -> Iterator[Contest]:
    """One after the other, since their operands take memory."""
    for case, grad in _host_cases(256, 256, 256):
        ours = {backend: partial(kernel_twins.matmul, backend=backend) for backend in OURS}
        yield _host("matmul", case, {"torch": torch.mm, **ours}, _operands(case, grad)[:2])  # all are square
    for grad in (False, True):
        variant = {"grad": "yes"} if grad else {}
        case = Case.of(256, 256, 256, dtype="bf16", act="gelu", **variant)
        yield _host("linear", case, {"torch": _eager("gelu"), **_linear("gelu", OURS)}, _operands(case, grad))
    for grad in (False, True):
        yield _forward(4096, 4096, 4096, "gelu", grad)
    for activation in ACTIVATIONS:
        yield _forward_and_backward(4096, 4096, 4096, activation)
    yield _forward_and_backward(8192, 8192, 4096, "gelu")
    yield _forward_and_backward(4096, 14336, 4096, "gelu")
    for case, grad in _host_cases(64, 256):
        yield _host("softmax", case, {"torch": _SOFTMAX, **_softmax(OURS)}, (_matrix(case).requires_grad_(grad),))
    for m, n in ((16_384, 4_096), (4_096, 1_024)):
        case = Case.of(m, n, dtype="bf16")
        functions = _beside_compiled(_SOFTMAX, _softmax(("cuda", "triton")))
        yield _gpu("softmax", case, functions, (_matrix(case).requires_grad_(),))
    for name in _NORMS:
        for case, grad in _host_cases(64, 256):
            functions = {"torch": _norm(name, 256), **_norms(name, 256, OURS)}
            yield _host(name, case, functions, _normalised(name, case, grad))
        for m, n in ((16_384, 4_096), (4_096, 4_096), (4_096, 1_024)):
            case = Case.of(m, n, dtype="bf16")
            functions = _beside_compiled(_norm(name, n), _norms(name, n, ("cuda", "triton")))
            yield _gpu(name, case, functions, _normalised(name, case, True))
            if m == 4_096:  # rows are few, and the host's part counts
                yield _backward(name, case, functions, _normalised(name, case, True))
    for case, grad in _host_cases(64, 256):
        functions = {"torch": _entropy(case), **_entropies(case, OURS)}
        yield _host("cross_entropy", case, functions, (_matrix(case).requires_grad_(grad),))
    for m, n in ((8_192, 32_768), (1_766, 151_936)):
        case = Case.of(m, n, dtype="bf16")
        functions = _beside_compiled(_entropy(case), _entropies(case, ("cuda", "triton")))
        yield _gpu("cross_entropy", case, functions, (_matrix(case).requires_grad_(),))
    for case, grad in _host_cases(64, 256, act="gelu"):
        yield _dropout(case, grad)
    for name in _REDUCTIONS:
        case = Case.of(64, 256, dtype="bf16")
        ours = {backend: partial(getattr(kernel_twins, name), dim=-1, backend=backend) for backend in OURS}
        yield _host(name, case, {"torch": partial(getattr(torch, name), dim=-1), **ours}, (_matrix(case),))


def _host_cases(*shape: int, **variant: str) -> Iterator[tuple[Case, bool]]:
    """What the host's time of a function is told of, and whether the operands require gradients."""
    for dtype, grad in (("bf16", False), ("bf16", True), ("fp32", False)):
        yield Case.of(*shape, dtype=dtype, **variant, **({"grad": "yes"} if grad else {})), grad


def _operands(case: Case, grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x: [M, K], weight: [N, K], bias: [N]; the products' sums are of unit variance."""
    m, n, k = case.shape
    source = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=source, device="cuda") * scale
        return values.to(DTYPE[case.dtype]).requires_grad_(grad)

    return normal(m, k), normal(n, k, scale=k**-0.5), normal(n)


def _matrix(case: Case, seed: int = 0) -> Tensor:
    """[M, N] of the case's first two sizes."""
    source = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(case.shape[:2], generator=source, device="cuda").to(DTYPE[case.dtype])


def _softmax(backends: tuple[str, ...]) -> dict[str, Function]:
    return {backend: partial(kernel_twins.softmax, backend=backend) for backend in backends}


def _normalised(name: str, case: Case, grad: bool) -> tuple[Tensor, ...]:
    """x: [M, N], weight: [N], about 1, and of layer_norm, bias: [N]."""
    weight, *bias = (_matrix(Case.of(1, case.shape[1], dtype=case.dtype), seed=seed)[0] for seed in (2, 3))
    vectors = (0.1 * weight + 1, *bias) if name == "layer_norm" else (0.1 * weight + 1,)
    return tuple(tensor.requires_grad_(grad) for tensor in (_matrix(case), *vectors))


def _norm(name: str, n: int, **backend: str) -> Function:
    norm: Function = getattr(kernel_twins if backend else functional, name)

    def function(x: Tensor, *affine: Tensor) -> Tensor:
        return norm(x, (n,), *affine, **backend)

    return function


def _norms(name: str, n: int, backends: tuple[str, ...]) -> dict[str, Function]:
    return {backend: _norm(name, n, backend=backend) for backend in backends}


def _entropy(case: Case, **backend: str) -> Function:
    target = torch.arange(case.shape[0], device="cuda") * 7919 % case.shape[1]
    return partial((kernel_twins if backend else functional).cross_entropy, target=target, **backend)


def _entropies(case: Case, backends: tuple[str, ...]) -> dict[str, Function]:
    return {backend: _entropy(case, backend=backend) for backend in backends}


def _dropout(case: Case, grad: bool) -> Contest:
    """dropout(gelu(x + bias)) + residual, with a tenth dropped: judged with nothing dropped, for the masks differ."""
    x, residual, (bias, *_) = (_matrix(case, seed=seed) for seed in range(3))
    operands = tuple(tensor.requires_grad_(grad) for tensor in (x, residual, bias.clone()))

    def eager(x: Tensor, residual: Tensor, bias: Tensor, p: float) -> Tensor:
        return functional.dropout(functional.gelu(x + bias), p) + residual

    def ours(x: Tensor, residual: Tensor, bias: Tensor, p: float, backend: str) -> Tensor:
        return kernel_twins.dropout_add(x, residual, p, bias=bias, activation="gelu", backend=backend)

    functions: dict[str, Function] = {"torch": eager, **{each: partial(ours, backend=each) for each in OURS}}
    judged = _host("dropout_add", case, {name: partial(each, p=0.0) for name, each in functions.items()}, operands)
    calls = {name: partial(each, *operands, p=0.1) for name, each in functions.items()}
    return replace(judged, calls=calls, judged=judged.calls)


def _eager(activation: str) -> Function:
    activate = ACTIVATIONS[activation]

    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return activate(functional.linear(x, weight, bias))

    return linear


def _linear(activation: str, backends: tuple[str, ...]) -> dict[str, Function]:
    name = None if activation == "none" else activation
    return {backend: partial(kernel_twins.linear, activation=name, backend=backend) for backend in backends}


def _host(function: str, case: Case, functions: Mapping[str, Function], operands: tuple[Tensor, ...]) -> Contest:
    expected = (functions["torch"](*(operand.detach().float() for operand in operands)),)
    calls = {backend: partial(each, *operands) for backend, each in functions.items()}
    return Contest("host", function, case, calls, expected)


def _beside_compiled(eager: Function, ours: Mapping[str, Function]) -> dict[str, Function]:
    torch.compiler.reset()  # else a new shape is compiled for any shape, and the next contests for none
    return {"torch": eager, "compiled": torch.compile(eager, fullgraph=True, dynamic=False), **ours}


def _functions(activation: str) -> dict[str, Function]:
    return _beside_compiled(_eager(activation), _linear(activation, ("cuda", "triton")))


def _forward(m: int, n: int, k: int, activation: str, grad: bool) -> Contest:
    case = Case.of(m, n, k, dtype="bf16", act=activation, **({"grad": "yes"} if grad else {}))
    operands = _operands(case, grad)
    expected = (_eager(activation)(*(operand.detach().float() for operand in operands)),)
    calls = {backend: partial(each, *operands) for backend, each in _functions(activation).items()}
    return Contest("forward", "linear", case, calls, expected)


def _forward_and_backward(m: int, n: int, k: int, activation: str) -> Contest:
    case = Case.of(m, n, k, dtype="bf16", act=activation)
    return _gpu("linear", case, _functions(activation), _operands(case, True))


def _gpu(function: str, case: Case, functions: Mapping[str, Function], operands: tuple[Tensor, ...]) -> Contest:
    dout = torch.ones((), device="cuda") if function == "cross_entropy" else _matrix(case, seed=1)
    wide = tuple(operand.detach().float().requires_grad_() for operand in operands)
    expected = tuple(each.detach() for each in _pass(functions["torch"], wide, dout.float()))
    calls = {backend: partial(_pass, each, operands, dout) for backend, each in functions.items()}
    return Contest("gpu", function, case, calls, expected)


def _backward(function: str, case: Case, functions: Mapping[str, Function], operands: tuple[Tensor, ...]) -> Contest:
    """The backward pass alone, of forward passes that were made before."""
    both = _gpu(function, case, functions, operands)
    dout = _matrix(case, seed=1)

    def prepared(each: Function) -> Callable[[], Result]:
        return partial(_gradients, each(*operands), operands, dout)

    calls = {backend: partial(prepared, each) for backend, each in functions.items()}
    return replace(both, kind="backward", calls=calls, judged=both.calls)


def _pass(function: Function, operands: tuple[Tensor, ...], dout: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward: the result and those of the operands' gradients that there are."""
    return _gradients(function(*operands), operands, dout)


def _gradients(out: Tensor, operands: tuple[Tensor, ...], dout: Tensor) -> tuple[Tensor, ...]:
    for operand in operands:
        operand.grad = None
    out.backward(dout)
    return out, *(operand.grad for operand in operands if operand.grad is not None)
