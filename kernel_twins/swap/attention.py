"""Attention of models of transformers, which look it up by the name in their configuration; of others it is left."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from kernel_twins.functional.attention.attention import scaled_dot_product_attention
from kernel_twins.swap.table import Row

_OURS = "kernel_twins_"  # and the backend: a name in transformers' registry
_TORCHS = "sdpa"
_CALLS = {"scaled_dot_product_attention", "multi_head_attention_forward"}
_TORCHS_ALONE = ("position_bias", "softcap", "output_attentions")
_ASKS = re.compile(r"_attn_implementation\s*(==|!=|in\b|not in\b)[^\n]*\bsdpa\b")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    backend: str,
    by_torch: Callable[..., tuple[Tensor, None]],
    **others: Any,
) -> tuple[Tensor, None]:
    """As transformers calls an attention: query [B, H, Sq, D], key, value [B, H_KV, Sk, D], result [B, Sq, H, D].

    A mask, dropout, and what else ``scaled_dot_product_attention`` has no argument for, is left to ``by_torch``,
    transformers' own call of PyTorch's.
    """
    needs_torchs = any(not (others.get(name) is None or others[name] is False) for name in _TORCHS_ALONE)
    if attention_mask is not None or dropout > 0 or needs_torchs:
        given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal} | others
        return by_torch(module, query, key, value, attention_mask, **given)
    queries = query.shape[2]
    causal = queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal and key.shape[2] > queries:  # the first tokens of a cache that is longer
        key, value = key[:, :, :queries], value[:, :, :queries]
    out = scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=scaling, enable_gqa=key.shape[1] != query.shape[1], backend=backend
    )
    return out.transpose(1, 2).contiguous(), None


def replace_attention(model: nn.Module, backend: str) -> Iterator[Row]:
    inside: set[int] = set()
    for name, module in _pretrained(model):
        inside |= {id(each) for each in module.modules()}
        before = module.config._attn_implementation
        reason = _why_left(module, before)
        if not reason:
            _register(backend)
            module.set_attn_implementation(_OURS + backend)
            reason = "" if _names(module) == {_OURS + backend} else "transformers did not take it"
            if reason:
                module.set_attn_implementation(_TORCHS)
        after = "" if reason else "kernel_twins.scaled_dot_product_attention"
        yield Row(name, "attention", str(before), after, reason)
    for name, module in model.named_modules():
        if id(module) not in inside and not _CALLS.isdisjoint(names_in_forward(module)):
            reason = "its forward calls PyTorch's by name: call kernel_twins.scaled_dot_product_attention there"
            yield Row(name, "attention", type(module).__name__, reason=reason)


def restore_attention(model: nn.Module) -> Iterator[Row]:
    for name, module in _pretrained(model):
        before = str(module.config._attn_implementation)
        if before.startswith(_OURS):
            module.set_attn_implementation(_TORCHS)
            yield Row(name, "attention", before, _TORCHS)


def names_in_forward(module: nn.Module) -> tuple[str, ...]:
    """The names of globals and attributes in the code of a module's forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def _why_left(module: Any, before: str) -> str:
    """Why the attention of a model of transformers is left, or an empty string."""
    if before.startswith(_OURS):
        return f"it is replaced already, by backend={before.removeprefix(_OURS)!r}"
    if others := _names(module) - {_TORCHS}:
        return f"it is {min(map(str, others))}: call model.set_attn_implementation({_TORCHS!r}) before"
    kinds = {type(each) for each in module.modules()}
    files = {sys.modules[kind.__module__] for kind in kinds if "transformers" in kind.__module__.split(".")[0]}
    if not all(each._can_set_attn_implementation() for each in module.modules() if _is_pretrained(each)):
        return "its class takes no other attention"
    interface = type(_interface())
    for file in files:
        own = [each for each in vars(file).values() if isinstance(each, interface)]
        if any(each[_TORCHS] is not _interface()[_TORCHS] for each in own):
            return f"{file.__name__} has an attention of its own"
        if _ASKS.search(inspect.getsource(file)):
            return f"{file.__name__} asks whether the attention is called {_TORCHS}"
    return ""


def _names(module: nn.Module) -> set[str]:
    """The names of the attention of a model and the models in it."""
    configs: list[Any] = [each.config for each in module.modules() if _is_pretrained(each)]
    return {config._attn_implementation for config in configs}


def _register(backend: str) -> None:
    import transformers

    name = _OURS + backend
    transformers.AttentionInterface.register(name, partial(attend, backend=backend, by_torch=_interface()[_TORCHS]))
    transformers.AttentionMaskInterface.register(name, transformers.AttentionMaskInterface()[_TORCHS])


def _interface() -> Any:
    import transformers

    return transformers.AttentionInterface()


def _is_pretrained(module: nn.Module) -> bool:
    library: Any = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def _pretrained(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost models of transformers."""
    inside: set[int] = set()
    for name, module in model.named_modules():
        if _is_pretrained(module) and id(module) not in inside:
            inside |= {id(each) for each in module.modules()}
            yield name, module
