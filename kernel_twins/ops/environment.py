"""What a library leaves in the environment, undone."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Undo what the code within does to Triton's environment variables.

    torch.compile sets TRITON_PTXAS_PATH to PyTorch's ptxas and leaves it set. Every Triton kernel that this process, or
    one that it starts, compiles from then on would be assembled by another compiler than those before, and measured
    as if by the same. As torch.compile sets it once, it is made to forget that it has, and does so again next time.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("TRITON_") and name not in before]:
            del os.environ[name]
        os.environ.update(before)
        if (tasks := sys.modules.get("torch._inductor.runtime.compile_tasks")) is not None:
            tasks._set_triton_ptxas_path.cache_clear()
