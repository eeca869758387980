"""Modules of small networks that are replaced and restored, on the CPU: what stays, what is left, what is computed.

backend="torch" calls the public functions, whose PyTorch side computes there.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

from kernel_twins.nn import replace_, restore_  # noqa: E402
from kernel_twins.swap.classes import Replaced  # noqa: E402

BY_BACKEND = pytest.mark.parametrize("backend", ["auto", "torch"])


class ForeignRMSNorm(nn.Module):
    """As models write it themselves."""

    def __init__(self, n: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.variance_epsilon = eps

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * y.to(x.dtype) * scale


class ShiftedRMSNorm(ForeignRMSNorm):
    def forward(self, x: Any, scale: float = 1.0) -> Any:
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        return ((1 + self.weight.float()) * y).to(x.dtype)


class OtherRMSNorm(ForeignRMSNorm):
    def forward(self, x: Any, scale: float = 1.0) -> Any:
        return super().forward(x - x.mean(-1, keepdim=True))


class HiddenEpsRMSNorm(ForeignRMSNorm):
    def forward(self, x: Any, scale: float = 1.0) -> Any:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)


class FailingRMSNorm(ForeignRMSNorm):
    def forward(self, x: Any, scale: float = 1.0) -> Any:
        raise NotImplementedError


class OwnLinear(nn.Linear):
    def forward(self, input: Any) -> Any:  # noqa: A002
        return super().forward(input) + 1


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.first = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(approximate="tanh"), nn.RMSNorm(12), nn.Linear(12, 8))
        self.second = ForeignRMSNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    def forward(self, tokens: Any) -> Any:
        x = self.embedding(tokens)
        x = x + self.mlp(self.first(x))
        return self.criterion(self.head(self.second(x)).flatten(0, -2), tokens.flatten())


def network() -> Network:
    torch.manual_seed(0)
    made = Network()
    for name in ("first", "mlp.2", "second"):
        nn.init.normal_(made.get_parameter(f"{name}.weight"))
    return made


def trained(model: Any) -> tuple[Any, dict[str, Any]]:
    model.zero_grad()
    tokens = torch.arange(12).reshape(3, 4)
    loss = model(tokens)
    loss.backward()
    return loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters()}


def reasons(model: Any, **options: Any) -> list[str]:
    return [row.reason for row in replace_(model, **options)]


@BY_BACKEND
def test_a_replaced_network_computes_the_same_and_is_the_same_afterwards(backend) -> None:
    model, right = network(), network()
    classes = [type(module) for module in model.modules()]
    table = replace_(model, backend=backend)
    assert not table.left and [row.name for row in table.swapped] == [
        *("first", "mlp.0", "mlp.1", "mlp.2", "mlp.3", "second", "head", "criterion")
    ]
    for found, wanted in zip(trained(model), trained(right), strict=True):
        torch.testing.assert_close(found, wanted)
    assert len(restore_(model)) == len(table)
    assert [type(module) for module in model.modules()] == classes
    assert [vars(module).keys() for module in model.modules()] == [vars(module).keys() for module in right.modules()]


def test_with_auto_on_the_cpu_it_is_pytorchs_to_the_last_bit() -> None:
    model, right = network(), network()
    replace_(model)
    for found, wanted in zip(trained(model), trained(right), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_names_state_ties_mode_dtype_and_identity_stay() -> None:
    model = network().to(torch.bfloat16).eval()
    before, modules = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    replace_(model)
    assert dict(model.named_modules()) == modules and str(model.first).startswith("LayerNorm(")
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.head.weight is model.embedding.weight
    assert not any(module.training for module in model.modules())
    assert all(each.dtype == torch.bfloat16 for each in model.parameters())
    assert isinstance(model.first, nn.LayerNorm) and isinstance(model.second, ForeignRMSNorm)
    model.load_state_dict(before)
    assert model.train().mlp[2].training and model.float().head.weight.dtype == torch.float32


def test_hooks_fire_and_keep_an_activation_apart() -> None:
    model, seen = network(), []
    model.mlp[0].register_forward_hook(lambda module, given, result: seen.append(result.detach()))
    model.first.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model.head.register_full_backward_hook(lambda module, given, result: seen.append(given[0]))
    table = replace_(model)
    assert [row.reason for row in table.left] == [
        "it, or the linear layer before it, has hooks, which see what lies between"
    ]
    trained(model)
    assert len(seen) == 3 and bool((seen[1] < -0.2).any())  # less than any GELU


@BY_BACKEND
def test_a_copy_and_a_pickle_are_replaced_and_can_be_restored(backend) -> None:
    model = network()
    replace_(model, backend=backend)
    right = trained(model)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(module) for module in made.modules()] == [type(module) for module in model.modules()]
        assert made.head.weight is made.embedding.weight and made.head.weight is not model.head.weight
        torch.testing.assert_close(trained(made), right, rtol=0, atol=0)
        restore_(made)
        assert not any(isinstance(module, Replaced) for module in made.modules())
    assert isinstance(model.head, Replaced)


@BY_BACKEND
def test_it_compiles_to_one_graph_before_and_after(backend) -> None:
    model = network()
    compiled, right = torch.compile(model, backend="aot_eager", fullgraph=True), trained(model)
    torch.testing.assert_close(trained(compiled)[0], right[0])
    replace_(compiled, backend=backend)
    assert isinstance(model.head, Replaced)
    torch.testing.assert_close(trained(compiled)[0], right[0])
    restore_(compiled)
    torch.testing.assert_close(trained(compiled)[0], right[0])


def test_replacing_again_changes_nothing_and_says_so() -> None:
    model = network()
    first = replace_(model, backend="torch")
    again = replace_(model)
    assert not again.swapped and len(again.left) == len(first)
    assert {row.reason for row in again} == {"it is replaced already, by backend='torch'", "it is replaced already"}
    restore_(model)
    assert not restore_(model)


@pytest.mark.parametrize(
    ("option", "kinds"), [("norms", {"norm"}), ("linears", {"linear", "activation"}), ("losses", {"loss"})]
)
def test_each_kind_can_be_left(option, kinds) -> None:
    wanted: dict[str, Any] = {option: False}
    table = replace_(network(), **wanted)
    assert {row.kind for row in table} == {"norm", "linear", "activation", "loss"} - kinds


def test_the_model_itself_may_be_such_a_module() -> None:
    layer = nn.Linear(4, 3)
    assert [row.name for row in replace_(layer)] == [""] and isinstance(layer, Replaced)
    assert "(the model)" in str(restore_(layer)) and type(layer) is nn.Linear


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (OtherRMSNorm, "computes something else than rms_norm"),
        (HiddenEpsRMSNorm, "computes something else than rms_norm"),
        (FailingRMSNorm, "fails on a tensor of the CPU: NotImplementedError"),
    ],
)
def test_a_norm_that_computes_something_else_is_left(norm, reason) -> None:
    state = torch.get_rng_state()
    module = norm(32)
    before = copy.deepcopy(module.state_dict())
    (row,) = replace_(module)
    assert reason in row.reason and not row.after and type(module) is norm
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(module.weight, before["weight"])


def test_a_weight_may_be_a_distance_from_one() -> None:
    module, right = ShiftedRMSNorm(32), ShiftedRMSNorm(32)
    (row,) = replace_(module, backend="torch")
    assert row.after == "kernel_twins.rms_norm" and "offset=1.0" in repr(module)
    x = torch.randn(3, 32)
    torch.testing.assert_close(module(x), right(x))


def test_a_norm_of_its_own_forward_keeps_calls_that_are_not_ours() -> None:
    module, right = ForeignRMSNorm(8), ForeignRMSNorm(8)
    replace_(module, backend="torch")
    x = torch.randn(2, 8)
    assert torch.equal(module(x, scale=2.0), right(x, scale=2.0))
    assert module(x.bfloat16()).dtype == right(x.bfloat16()).dtype == torch.float32
    module.variance_epsilon = right.variance_epsilon = 0.5
    torch.testing.assert_close(module(x), right(x))


def test_other_modules_are_left_with_a_reason() -> None:
    patched, parametrized = nn.Linear(4, 4), nn.Linear(4, 4)
    vars(patched)["forward"] = nn.Identity()
    parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    sharded, named = nn.Linear(4, 4), nn.LayerNorm(4)
    sharded.weight = nn.Parameter(torch.zeros(0))
    named.backend = "mine"  # type: ignore[assignment]
    model = nn.ModuleList([patched, parametrized, OwnLinear(4, 4), sharded, named, nn.LazyLinear(4)])
    classes = [type(module) for module in model]
    table = replace_(model)
    assert [row.reason for row in table] == [
        "its forward is patched",
        "it is parametrized",
        "the forward of OwnLinear is its own",
        "its weight is [0], not [out_features, in_features]",
        "it has an attribute backend of its own",
        "its weight is a UninitializedParameter",
    ]
    assert [type(module) for module in model] == classes


def test_parameters_of_other_classes_are_left() -> None:
    quantized = type("Quantized", (torch.Tensor,), {})
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.zeros(4, 4).as_subclass(quantized))
    assert reasons(layer) == ["its weight is a Quantized"]


def test_smoothed_class_weights_are_for_auto_alone() -> None:
    loss = nn.CrossEntropyLoss(torch.rand(5), label_smoothing=0.1)
    right = nn.CrossEntropyLoss(label_smoothing=0.1)
    reason = "class weights with label smoothing are PyTorch's alone, and backend is 'cuda'"
    assert reasons(loss, backend="cuda") == [reason]
    right.weight = loss.weight
    replace_(loss)
    x, target = torch.randn(3, 5), torch.tensor([0, 4, 2])
    assert torch.equal(loss(x, target), right(x, target))


@pytest.mark.parametrize("kind", [nn.GELU, nn.ReLU, nn.SiLU])
def test_an_activation_is_fused_once_where_both_stand_at_one_place(kind) -> None:
    shared, twice = kind(), nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), kind(), nn.Linear(4, 4), shared, nn.Linear(4, 4), shared, twice, kind())
    model.append(twice)
    right = copy.deepcopy(model)
    table = replace_(model, backend="torch")
    fused = [row.name for row in table.swapped if row.kind == "activation"]
    assert fused == ["1"] and [row.name for row in table.left] == ["3", "5", "7"]
    x = torch.randn(5, 4)
    torch.testing.assert_close(model(x), right(x))


def test_a_sequential_with_a_forward_of_its_own_is_not_fused() -> None:
    class Reversed(nn.Sequential):
        def forward(self, x: Any) -> Any:
            for module in reversed(self):
                x = module(x)
            return x

    table = replace_(Reversed(nn.Linear(4, 4), nn.ReLU()))
    assert [row.kind for row in table] == ["linear"]


def test_a_class_that_was_put_over_it_since_is_left() -> None:
    layer = nn.Linear(4, 4)
    replace_(layer)
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    (row,) = restore_(layer)
    assert row.reason == "ParametrizedLinear lies over it: take that away first"
    parametrize.remove_parametrizations(layer, "weight")
    restore_(layer)
    assert type(layer) is nn.Linear


def test_attention_that_is_called_by_name_is_told() -> None:
    model = nn.TransformerEncoderLayer(8, 2)
    (row,) = (row for row in replace_(model) if row.kind == "attention")
    assert row.name == "self_attn" and "call kernel_twins.scaled_dot_product_attention there" in row.reason


def test_the_table_is_read_by_people_and_by_programs() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(12)), OwnLinear(4, 4))
    table = replace_(model)
    assert len(table) == 25 and len(table.swapped) == 24 and table[-1] in table.left and len(table[:2]) == 2
    assert str(table).splitlines() == [
        "name  count  kind    from       to",
        "*.*   12     norm    LayerNorm  kernel_twins.layer_norm",
        "*.*   12     linear  Linear     kernel_twins.linear",
        "*     1      linear  OwnLinear  left: the forward of OwnLinear is its own",
        "24 swapped, 1 left",
    ]


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"model is a list, must be a torch.nn.Module: pass the model itself"):
        replace_([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model is a NoneType"):
        restore_(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="norms is 1, must be True or False: pass False to leave them"):
        replace_(nn.Linear(4, 4), norms=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend is 'numpy', must be one of auto, cuda, triton, torch"):
        replace_(nn.Linear(4, 4), backend="numpy")
