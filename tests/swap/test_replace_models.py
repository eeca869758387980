"""Models of transformers and timm that are replaced, on the CPU, by both ways there: losses and gradients stay."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_twins.nn import replace_, restore_  # noqa: E402
from tests.swap.models import MODELS, lost, model_of  # noqa: E402

BY_MODEL = pytest.mark.parametrize("name", MODELS)


def trained(model: Any, name: str) -> tuple[Any, dict[str, Any]]:
    model.zero_grad()
    loss = lost(model, name)
    loss.backward()
    return loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("backend", ["auto", "torch"])
@BY_MODEL
def test_a_replaced_model_computes_the_same(name, backend) -> None:
    model = model_of(name)
    right, state = trained(model, name), copy.deepcopy(model.state_dict())
    classes = [type(module) for module in model.modules()]
    table = replace_(model, backend=backend)
    assert {"norm", "linear"} <= {row.kind for row in table.swapped}
    for found in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(trained(found, name), right, rtol=1e-4, atol=1e-5)
    assert model.state_dict().keys() == state.keys()
    assert len(restore_(model)) == len(table.swapped) and not restore_(model)
    assert [type(module) for module in model.modules()] == classes
    torch.testing.assert_close(trained(model, name), right, rtol=0, atol=0)


@BY_MODEL
def test_it_compiles(name) -> None:
    model = model_of(name)
    right = trained(model, name)
    replace_(model, backend="torch")
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(trained(compiled, name)[0], right[0], rtol=1e-4, atol=1e-5)


def test_a_llama_is_replaced_wholly() -> None:
    model = model_of("llama")
    table = replace_(model)
    assert not table.left and {row.kind for row in table} == {"norm", "linear", "loss", "attention"}
    assert model.config._attn_implementation == "kernel_twins_auto"
    again = replace_(model, backend="torch")
    assert not again.swapped and len(again) == len(table)
    restore_(model)
    assert model.config._attn_implementation == "sdpa" and "_loss_function" not in vars(model)


def test_a_padded_batch_attends_with_its_mask() -> None:
    model = model_of("llama").eval()
    tokens = torch.arange(24).reshape(2, 12)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, :5] = 0
    right = model(tokens, attention_mask=mask).logits
    replace_(model, backend="torch")
    torch.testing.assert_close(model(tokens, attention_mask=mask).logits, right, rtol=1e-4, atol=1e-5)


def test_generated_tokens_stay() -> None:
    model = model_of("llama").eval()
    tokens = torch.arange(12).reshape(2, 6)
    right = model.generate(tokens, max_new_tokens=6, do_sample=False)
    replace_(model, backend="torch")
    assert torch.equal(model.generate(tokens, max_new_tokens=6, do_sample=False), right)


def test_a_loss_over_a_number_of_items() -> None:
    model = model_of("llama")
    tokens = torch.arange(24).reshape(2, 12)
    labels = tokens.masked_fill(tokens < 3, -100)
    right = [model(tokens, labels=labels, num_items_in_batch=each).loss for each in (None, 7, torch.tensor(7))]
    replace_(model, backend="torch")
    found = [model(tokens, labels=labels, num_items_in_batch=each).loss for each in (None, 7, torch.tensor(7))]
    torch.testing.assert_close(found, right)


def test_attention_that_is_not_sdpa_is_left_and_a_loss_that_was_set() -> None:
    model = model_of("llama")
    model.set_attn_implementation("eager")
    model.loss_function = model.loss_function
    reasons = {row.kind: row.reason for row in replace_(model).left}
    assert reasons == {
        "attention": "it is eager: call model.set_attn_implementation('sdpa') before",
        "loss": "it was set by hand",
    }
    assert model.config._attn_implementation == "eager"


def test_gemmas_norms_have_an_offset() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
        head_dim=16,
    )
    model = transformers.Gemma2ForCausalLM(config)
    tokens = torch.arange(12)[None]
    right = model(tokens).logits
    table = replace_(model, backend="torch", linears=False, attention=False)
    assert {row.after for row in table if row.kind == "norm"} == {"kernel_twins.rms_norm"}
    torch.testing.assert_close(model(tokens).logits, right, rtol=1e-4, atol=1e-4)


def test_what_stays_pytorchs_in_a_gpt2_and_in_a_vit() -> None:
    of_gpt2 = {row.before: row.reason for row in replace_(model_of("gpt2")).left}
    assert of_gpt2 == {"Conv1D": "its weight is [in_features, out_features]"}
    (of_vit,) = {row.reason for row in replace_(model_of("vit")).left}
    assert "calls PyTorch's by name" in of_vit
