"""The GPU's memory that this process holds, by NVML: what the driver says is free hangs on all other processes, too."""

from __future__ import annotations

import gc
import os

import pytest

from kernel_twins.harness import sensors


def held_bytes() -> int:
    """Of torch's allocator and everybody else in this process, without what the allocator only keeps for later."""
    import torch

    nvml = pytest.importorskip("pynvml")
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    gpu = sensors._handle(nvml, torch.cuda.current_device())
    held = {each.pid: each.usedGpuMemory for each in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    if not held.get(os.getpid()):
        pytest.skip("NVML does not tell this process's memory, as in a container with process numbers of its own")
    return int(held[os.getpid()])
