"""Memory that kernels need beside their operands and that must hold a value from one launch to the next."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.runtime import driver

COUNTERS = 2048

_counters: dict[tuple[int, int, bool], tuple[int, Tensor]] = {}  # by GPU, stream, and whether it is being captured


def counter(device: torch.device) -> Tensor:
    """COUNTERS int32 that are 0 when a kernel on the current stream starts, if every kernel leaves them so.

    Each stream has its own, so that kernels under way at the same time never share one. So has each graph: under
    capture they are allocated and zeroed inside the graph, once for a stream. Only the newest capture's is remembered.
    """
    if device.type != "cuda":
        return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
    stream = driver.active.get_current_stream(device.index)
    capturing = torch.cuda.is_current_stream_capturing()
    # A capture that was given up never zeroed its counters, so the next one, of another id, must not take them over.
    capture = _capture_id(stream) if capturing else 0
    known = _counters.get((device.index, stream, capturing))
    if known is None or known[0] != capture:
        known = capture, torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        _counters[device.index, stream, capturing] = known
    return known[1]


def _capture_id(stream: int) -> int:
    """The number of the capture that the stream is part of, which no other capture of this process has."""
    from cuda.bindings import runtime  # a dependency of torch, and slow to import

    # Error, status, id; what follows depends on the version.
    error, _, capture, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaStreamGetCaptureInfo failed on stream {stream:#x}: {error!r}")
    return int(capture)
