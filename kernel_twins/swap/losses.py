"""The loss of tokens in models of transformers, which call PyTorch's function and have no module for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from kernel_twins.functional.loss.cross_entropy import cross_entropy
from kernel_twins.swap.attention import names_in_forward
from kernel_twins.swap.table import Row

_SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}


@dataclass(frozen=True)
class TokenLoss:
    """transformers' ForCausalLMLoss, which ``shifts`` the labels by one token, or ForMaskedLMLoss.

    logits [..., vocab_size] are taken in float32 and labels [...] flattened; the loss is the mean over labels that are
    not ``ignore_index``, or their sum over ``num_items_in_batch``.
    """

    shifts: bool
    backend: str

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if self.shifts:
            labels = (
                functional.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
            )
        loss = cross_entropy(
            logits.float().view(-1, vocab_size),
            labels.reshape(-1).to(logits.device),
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            backend=self.backend,
        )
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def replace_losses(model: nn.Module, backend: str) -> Iterator[Row]:
    known = sys.modules.get("transformers.loss.loss_utils")
    for name, module, loss in _losses(model):
        before, after = getattr(loss, "__name__", type(loss).__name__), TokenLoss.__name__
        if isinstance(loss, TokenLoss):
            yield Row(name, "loss", after, reason=f"it is replaced already, by backend={loss.backend!r}")
        elif before not in _SHIFTS or loss is not getattr(known, before, None):
            yield Row(name, "loss", before, reason="it is none of " + ", ".join(_SHIFTS))
        elif "_loss_function" in vars(module):
            yield Row(name, "loss", before, reason="it was set by hand")
        else:
            module.loss_function = TokenLoss(_SHIFTS[before], backend)
            yield Row(name, "loss", before, f"kernel_twins.cross_entropy in {after}")


def restore_losses(model: nn.Module) -> Iterator[Row]:
    for name, module, loss in _losses(model):
        if isinstance(loss, TokenLoss):
            del module.__dict__["_loss_function"]
            after = next(each for each, shifts in _SHIFTS.items() if shifts == loss.shifts)
            yield Row(name, "loss", TokenLoss.__name__, after)


def _losses(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Models of transformers whose forward calls their loss function."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    for name, module in model.named_modules() if library else ():
        if isinstance(module, library.PreTrainedModel) and "loss_function" in names_in_forward(module):
            yield name, module, module.loss_function
