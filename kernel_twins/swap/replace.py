"""``kernel_twins.nn.replace_`` and ``restore_``."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from kernel_twins.functional.backends import BACKENDS
from kernel_twins.swap.attention import replace_attention, restore_attention
from kernel_twins.swap.classes import PassThrough, Replaced, is_outermost, put, take_away
from kernel_twins.swap.losses import replace_losses, restore_losses
from kernel_twins.swap.modules import RULES, Behind, Swap, behind
from kernel_twins.swap.table import Row, Table


def replace_(
    model: nn.Module,
    *,
    norms: bool = True,
    linears: bool = True,
    attention: bool = True,
    losses: bool = True,
    backend: str = "auto",
) -> Table:
    """Has the modules of a model call the public functions, in place; returns what was swapped, what was left and why.

    - ``norms``: torch.nn.LayerNorm and RMSNorm, and any module named ...RMSNorm or ...LayerNorm whose forward is its
      own, such as transformers' LlamaRMSNorm, if that computes what ``rms_norm`` or ``layer_norm`` does, with its
      gradients: its forward is asked on small float32 and bfloat16 tensors of the CPU. It keeps calls with other
      arguments than one tensor, or of another dtype than its weight's, and with "auto" those off the GPU.
    - ``linears``: torch.nn.Linear. GELU, ReLU or SiLU behind one in a torch.nn.Sequential is fused into it, and passes
      its input through, if neither has hooks nor stands at another place. A Sequential that is called in parts must
      not be replaced.
    - ``attention``: that of models of transformers which is "sdpa", by a name in transformers' registry. Calls with a
      mask or dropout stay PyTorch's. Where another forward calls PyTorch's function by name it is left.
    - ``losses``: torch.nn.CrossEntropyLoss, and transformers' loss of tokens, taken in float32 as there.

    A module that is swapped stays the same object and gets a subclass of its class: names, parameters and their ties,
    state dict, hooks, dtype, device and mode stay, and so does what ``isinstance`` says. It can be copied, pickled and
    compiled; a process that unpickles a model whose attention was swapped must have called this for one before. Left
    are: parametrized modules, such with a patched forward, subclasses with a forward of their own (but for norms),
    and parameters of other classes, such as DTensor and quantized ones: call this before fully_shard. A module that
    was replaced before is left.

    ``backend`` is that of all calls, as of every public function: "auto" leaves to PyTorch what the others do not take,
    such as float32 linear layers, and a named one refuses it when the module is called.

    TypeError or ValueError names the argument at fault.
    """
    _require_model(model)
    chosen = {"norm": norms, "linear": linears, "loss": losses}
    for name, given in {"norms": norms, "linears": linears, "attention": attention, "losses": losses}.items():
        if not isinstance(given, bool):
            raise TypeError(f"{name} is {given!r}, must be True or False: pass False to leave them")
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, must be one of {', '.join(BACKENDS)}: pass 'auto' for the fastest")
    kinds = [kind for kind, wanted in chosen.items() if wanted]
    activations = behind(model) if linears else {}
    rows: dict[str, Row] = {}
    for name, module in [*model.named_modules()]:
        if name not in rows:  # an activation has a row beside its linear layer's
            found = _replaced(name, module, kinds, activations.get(id(module)), backend)
            rows |= {row.name: row for row in found}
    of_losses = replace_losses(model, backend) if losses else ()
    of_attention = replace_attention(model, backend) if attention else ()
    return Table([*rows.values(), *of_losses, *of_attention])


def restore_(model: nn.Module) -> Table:
    """Undoes ``replace_``, for whatever was swapped in a model; returns what was given back, what was left and why.

    A module that another class was put over since, as a parametrization does, is left.
    """
    _require_model(model)
    rows = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, Replaced):
            continue
        row = Row(name, module.kind, module.after, module.replaced.__qualname__)
        if is_outermost(module):
            take_away(module)
            rows.append(row)
        else:
            over = type(module).__name__
            rows.append(Row(name, row.kind, row.before, reason=f"{over} lies over it: take that away first"))
    return Table([*rows, *restore_losses(model), *restore_attention(model)])


def _replaced(name: str, module: nn.Module, kinds: list[str], activation: Behind | None, backend: str) -> Iterator[Row]:
    if isinstance(module, Replaced):
        if module.kind in kinds or (module.kind == "activation" and "linear" in kinds):
            how = "" if isinstance(module, PassThrough) else f", by backend={module.backend!r}"
            yield Row(name, module.kind, module.replaced.__qualname__, reason=f"it is replaced already{how}")
        return
    for kind in kinds:
        found = RULES[kind](module, backend)
        before = type(module).__qualname__
        if isinstance(found, str):
            yield Row(name, kind, before, reason=found)
        elif found is not None:
            yield from _put(Row(name, kind, before, found.mixin.after), module, found, activation, backend)


def _put(row: Row, module: nn.Module, swap: Swap, activation: Behind | None, backend: str) -> Iterator[Row]:
    settings = swap.settings | {"backend": backend}
    if activation is not None and not activation.reason:
        settings["activation"] = activation.activation
    put(module, swap.mixin, settings)
    yield row
    if activation is not None:
        before = type(activation.module).__qualname__
        if not activation.reason:
            put(activation.module, PassThrough, {})
        after = "" if activation.reason else PassThrough.after
        yield Row(activation.name, "activation", before, after, activation.reason)


def _require_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, must be a torch.nn.Module: pass the model itself")
