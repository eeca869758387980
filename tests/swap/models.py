"""Small models of transformers and timm with random weights, without dropout, and their losses."""

from __future__ import annotations

from typing import Any

import pytest

MODELS = ("llama", "gpt2", "bert", "vit")
CLASSES = 64


def model_of(name: str) -> Any:
    """Skips where its library is not installed."""
    import torch

    torch.manual_seed(0)
    if name == "vit":
        timm = pytest.importorskip("timm")
        sizes = {"embed_dim": 64, "num_heads": 2, "depth": 2}
        return timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=CLASSES, **sizes)
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": CLASSES}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "sdpa"}
    if name == "llama":
        made = transformers.LlamaConfig(**sizes, **tokens, intermediate_size=96, num_key_value_heads=1)
        return transformers.LlamaForCausalLM(made)
    if name == "gpt2":
        without = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens, **without))
    without = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **tokens, **without, intermediate_size=96))


def lost(model: Any, name: str, device: str = "cpu", dtype: Any = None) -> Any:
    """The loss of a fixed batch."""
    import torch

    random = torch.Generator().manual_seed(1)
    if name == "vit":
        images = torch.randn(4, 3, 64, 64, generator=random).to(device, dtype)
        return torch.nn.functional.cross_entropy(model(images), torch.arange(4, device=device))
    tokens = torch.randint(0, CLASSES, (4, 32), generator=random).to(device)
    return model(input_ids=tokens, labels=tokens).loss
