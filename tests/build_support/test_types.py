"""What mypy is told to pass over in the files of Triton's kernels is the kernels, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _host_functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Those that Triton does not compile: it compiles what is under a decorator that ends in ``jit``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not any(
            ast.unparse(each).partition("(")[0].endswith(".jit") for each in node.decorator_list
        ):
            yield node


def test_all_but_kernels_is_annotated() -> None:
    bare = []
    for path in sorted((ROOT / "triton-kernels").rglob("*.py")):
        for function in _host_functions(ast.parse(path.read_text())):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            arguments += [each for each in (function.args.vararg, function.args.kwarg) if each]
            unsaid = [each.arg for each in arguments if each.annotation is None and each.arg not in ("self", "cls")]
            if unsaid or function.returns is None:
                bare.append(f"{path.relative_to(ROOT)}:{function.lineno} {function.name}: {', '.join(unsaid)}")
    assert not bare
