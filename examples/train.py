"""Trains small models with random weights by PyTorch's modules, then by ours: losses and milliseconds a step.

pip install -e ".[examples]", then python examples/train.py. A Llama, a GPT-2 and a BERT of transformers and a ViT of
timm learn one random batch by heart: eager, under autocast, compiled, and with checkpointed activations. All but
autocast's, whose parameters are float32, are in bfloat16. --table prints what was swapped in each model and what not.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from dataclasses import dataclass
from typing import Any

import timm
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import kernel_twins
from kernel_twins.functional.backends import BACKENDS

MODELS = ("llama", "gpt2", "bert", "vit")
WAYS = ("eager", "autocast", "compiled", "checkpointed")
PIXELS, PATCH, CLASSES = 224, 16, 1000


@dataclass(frozen=True)
class Sizes:
    """``heads`` of 64 columns each."""

    heads: int
    layers: int
    batch: int
    tokens: int
    vocabulary: int

    @property
    def width(self) -> int:
        return 64 * self.heads


def made(name: str, sizes: Sizes) -> nn.Module:
    """A model without dropout."""
    if name == "vit":
        model: nn.Module = timm.create_model(
            f"vit_base_patch{PATCH}_{PIXELS}",
            embed_dim=sizes.width,
            num_heads=sizes.heads,
            depth=sizes.layers,
            num_classes=CLASSES,
        )
        return model
    shared = {
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.tokens,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_implementation": "sdpa",
    }
    if name == "llama":
        config = transformers.LlamaConfig(**shared, intermediate_size=3 * sizes.width)
        return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]
    if name == "gpt2":
        config = transformers.GPT2Config(**shared, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]
    config = transformers.BertConfig(
        **shared,
        intermediate_size=4 * sizes.width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)  # type: ignore[no-any-return]


def lost(model: Any, batch: Tensor) -> Tensor:
    """The loss of images that are each their own class, or of tokens that are their own labels."""
    if batch.is_floating_point():
        return functional.cross_entropy(model(batch), torch.arange(len(batch), device=batch.device))
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def trained(
    name: str, way: str, sizes: Sizes, steps: int, device: str, backend: str | None
) -> tuple[list[float], float, kernel_twins.nn.Table | None]:
    """The losses of ``steps`` steps, the median of the later half's milliseconds, and the table of what was swapped.

    Without a backend it is PyTorch's modules that learn.
    """
    torch.manual_seed(0)
    dtype = torch.float32 if way == "autocast" else torch.bfloat16
    model: Any = made(name, sizes).to(device, dtype)
    if name == "vit":
        batch = torch.randn(sizes.batch, 3, PIXELS, PIXELS).to(device, dtype)
    else:
        batch = torch.randint(0, sizes.vocabulary, (sizes.batch, sizes.tokens)).to(device)
    table = None if backend is None else kernel_twins.nn.replace_(model, backend=backend)
    if way == "checkpointed":
        (model.set_grad_checkpointing if name == "vit" else model.gradient_checkpointing_enable)()
    called = torch.compile(model) if way == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, times = [], []
    for _ in range(steps):
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16) if way == "autocast" else contextlib.nullcontext():
            loss = lost(called, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        times.append(1e3 * (time.perf_counter() - start))
    return losses, statistics.median(times[steps // 2 :]), table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--table", action="store_true", help="print what was swapped in each model, and what not")
    sizes = {"heads": 12, "layers": 6, "batch": 8, "tokens": 1024, "vocabulary": 32000}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    given = parser.parse_args()
    chosen = Sizes(**{name: getattr(given, name) for name in sizes})

    print(f"{'':20}{'first loss, last loss':>42}{'ms a step':>20}")
    print(f"{'model, way':20}{'PyTorch':>21}{'ours':>21}{'PyTorch':>12}{'ours':>8}{'ratio':>8}")
    for name in given.models:
        for way in given.ways:
            right, before, _ = trained(name, way, chosen, given.steps, given.device, None)
            found, after, table = trained(name, way, chosen, given.steps, given.device, given.backend)
            losses = "".join(f"{each[0]:>13.4f}{each[-1]:>8.4f}" for each in (right, found))
            print(f"{f'{name}, {way}':20}{losses}{before:>12.2f}{after:>8.2f}{before / after:>8.2f}", flush=True)
        if given.table:
            print(f"\n{table}\n")


if __name__ == "__main__":
    main()
