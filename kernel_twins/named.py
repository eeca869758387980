"""Steps as a person types them: a name, or as much of its beginning as no other has, such as ``v03``."""

from __future__ import annotations

from collections.abc import Iterable

from kernel_twins.spec import Op, Step


def step(op: Op, text: str, argument: str = "step") -> Step:
    """The step of an operation that is meant; ValueError, which names the ``argument``, lists the candidates."""
    return op.step(whole(text, (each.name for each in op.steps), argument, op.name))


def whole(text: str, names: Iterable[str], argument: str, owner: str) -> str:
    """The name that ``text`` is, or else the only one that it begins.

    ValueError where there is none, or several; it lists them.
    """
    known = list(dict.fromkeys(names))
    if text in known:
        return text
    begun = [name for name in known if name.startswith(text)] if text else []
    if len(begun) == 1:
        return begun[0]
    if begun:
        raise ValueError(f"{argument} is {text!r}, with which several names of {owner} begin: {', '.join(begun)}")
    raise ValueError(f"{argument} is {text!r}; {owner} has {', '.join(known)}")
