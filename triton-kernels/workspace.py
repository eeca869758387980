"""Memory that kernels need beside their operands and that must hold a value from one launch to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from triton.runtime import driver

SIZE = 16384  # int32: up to 9 for each program that can run at once
COUNTERS = 2048  # of them serve tiles that programs share

_counters: dict[tuple[int, int, bool], tuple[int, Tensor]] = {}  # by GPU, stream, and whether it is being captured


def counter(device: torch.device) -> Tensor:
    """SIZE int32 that are 0 when a kernel on the current stream starts, if every kernel leaves them so.

    Each stream has its own, so that kernels under way at the same time never share one. So has each graph: under
    capture they are zeroed inside the graph, once for a stream. Only the newest capture's is remembered, and as nobody
    says when a graph is gone, an older one's is never used again: 64 KiB a capture.

    They come from the driver: memory of torch's that is kept makes its graph trees refuse the graph, or is handed out
    again with it.
    """
    if device.type != "cuda":
        return torch.zeros(SIZE, dtype=torch.int32, device=device)
    stream = driver.active.get_current_stream(device.index)
    capturing = torch.cuda.is_current_stream_capturing()
    # A capture that was given up never zeroed its counters, so the next one, of another id, must not take them over.
    capture = _capture_id(stream) if capturing else 0
    known = _counters.get((device.index, stream, capturing))
    if known is None or known[0] != capture:
        known = capture, torch.as_tensor(_Memory(4 * SIZE), device=device).zero_()
        if not capturing:
            torch.cuda.current_stream(device).synchronize()  # a search goes on on a stream of its own
        _counters[device.index, stream, capturing] = known
    return known[1]


@contextlib.contextmanager
def unrestricted() -> Iterator[None]:
    """While any thread captures, the driver neither allocates nor loads kernels, unless this one says that it knows."""
    from cuda.bindings import runtime  # a dependency of torch, and slow to import

    relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    error, before = runtime.cudaThreadExchangeStreamCaptureMode(relaxed)
    _require(error, "cudaThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        runtime.cudaThreadExchangeStreamCaptureMode(before)


class _Memory:
    """Memory of the current GPU's from the driver, never freed, as torch takes it over: int32."""

    def __init__(self, size: int) -> None:
        from cuda.bindings import runtime

        with unrestricted():
            error, pointer = runtime.cudaMalloc(size)
        _require(error, "cudaMalloc")
        self.__cuda_array_interface__ = {
            "shape": (size // 4,), "typestr": "<i4", "data": (int(pointer), False), "strides": None, "version": 3,
        }  # fmt: skip


def _require(error: object, call: str) -> None:
    from cuda.bindings import runtime

    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"{call} failed: {error!r}")


def _capture_id(stream: int) -> int:
    """The number of the capture that the stream is part of, which no other capture of this process has."""
    from cuda.bindings import runtime

    # Error, status, id; what follows depends on the version.
    error, _, capture, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    _require(error, f"cudaStreamGetCaptureInfo on stream {stream:#x}")
    return int(capture)
