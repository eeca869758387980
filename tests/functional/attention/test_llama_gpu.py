"""A small Llama of transformers learns with our attention what it learns with PyTorch's, and needs no more memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kernel_twins  # noqa: E402
from tests.attention_on_gpu import OURS  # noqa: E402

pytestmark = pytest.mark.gpu

STEPS = 20
BATCH, TOKENS = 4, 1024


def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: float, **_: Any) -> tuple[Any, None]:
    """As transformers calls an attention: [B, heads, S, D] in, [B, S, heads, D] out."""
    assert mask is None
    out = kernel_twins.attention(query, key, value, causal=True, scale=scaling, backend=module.config.backend)
    return out.transpose(1, 2), None


def learned(transformers: Any, attention: str, heads: int, backend: str = "") -> tuple[list[float], int]:
    """The losses of STEPS steps, and the most memory that one more forward and backward pass needs."""
    gc.collect()  # optimizers of PyTorch hold the last model in a cycle
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=2,
        vocab_size=1000,
        attn_implementation=attention,
    )
    config.backend = backend
    model = transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # larger steps amplify roundings
    tokens = torch.randint(0, 1000, (BATCH, TOKENS), device="cuda")
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.cuda.reset_peak_memory_stats()
    model(input_ids=tokens, labels=tokens).loss.backward()
    return losses, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("heads", [8, 4])  # of 64 columns, or 128
@OURS
def test_a_small_llama_learns_as_with_pytorch(backend, heads) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AttentionInterface.register("kernel_twins", attend)
    transformers.AttentionMaskInterface.register("kernel_twins", lambda *_, **__: None)
    found, memory = learned(transformers, "kernel_twins", heads, backend)
    right, allowed = learned(transformers, "sdpa", heads)
    assert right[-1] < right[0] - 0.3
    assert found == pytest.approx(right, rel=0.02)
    assert memory <= allowed * 1.01
