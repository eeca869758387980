"""The batching rule of torch.func.vmap for both sides of softmax and log_softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kernel_twins.functional.rows import Rule, counted, with_batch


def batching_rule(operator: Callable[..., Tensor], names: tuple[str, ...]) -> Rule:
    """A rule for ``torch.library.register_vmap`` of ``operator(*tensors, dim, log)``, tensors of one shape.

    ``names`` are the tensors' names in the operator's schema. The batch stays where it is, as one more dimension;
    tensors without a batch are expanded.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[Tensor, int]:
        values, options = given[: len(names)], given[len(names) :]  # the dispatcher drops trailing defaults
        at = next(each for each in in_dims if each is not None)
        batched = [
            with_batch(tensor, batch, at, info.batch_size)
            for tensor, batch in zip(values, in_dims[: len(names)], strict=True)
        ]
        rank = batched[0].dim() - 1
        dim = counted(options[0] if options else -1, names[0], rank)
        log = len(options) > 1 and options[1]
        if rank == 0:
            return operator(*(tensor.unsqueeze(1) for tensor in batched), 1, log).squeeze(1), 0
        return operator(*batched, dim + (dim >= at), log), at

    return rule
