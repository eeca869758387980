"""Zeroed memory that kernels use beside their operands, and that stays zero from one launch to the next."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from triton.runtime import driver

from kernel_twins._triton.lib import plans

SIZE = 16384  # int32, up to 9 a resident program
COUNTERS = 2048  # of these, for tiles that programs share
SEMAPHORE_BYTES = 128  # at least C's sem_t; glibc's has 32

_counters: dict[tuple[int, int], Tensor] = {}  # by GPU and stream; torch's streams live for ever
_captured: dict[tuple[int, int], tuple[int, Tensor]] = {}  # by GPU and stream: the last capture's id
_lent: dict[int, list[_Piece]] = {}  # pieces lent to graphs, by GPU
_lending = threading.Lock()


def counter(device: torch.device) -> Tensor:
    """SIZE int32 that are 0 when a kernel on the current stream starts, provided that every kernel leaves them 0.

    Kernels that may run at the same time never share them:

    - each of torch's streams has its own;
    - each graph has its own for each captured stream, zeroed inside the graph, and lent until the graph and all that
      was made of it are gone;
    - each call on any other stream has its own, since such a stream may be destroyed while it works, and its handle be
      reused.

    Memory that is kept comes from the driver. Kept memory of torch's allocator makes torch's graph trees refuse a
    graph, or is handed out again with it.
    """
    if device.type != "cuda":
        return torch.zeros(SIZE, dtype=torch.int32, device=device)
    stream = driver.active.get_current_stream(device.index)
    if torch.cuda.is_current_stream_capturing():
        return _of_capture(device, stream)
    known = _counters.get((device.index, stream))
    if known is None:
        current = torch.cuda.current_stream(device)
        if current.stream_id == stream != 0:  # not torch's: its id is then its handle
            return torch.as_tensor(_OfOneCall(stream), device=device).zero_()
        known = torch.as_tensor(_Piece(), device=device).zero_()
        current.synchronize()  # an autotuner's search continues on another stream
        _counters[device.index, stream] = known
    return known


def _of_capture(device: torch.device, stream: int) -> Tensor:
    """The stream's counters in this capture. Those of an abandoned capture were never zeroed, and stay unused."""
    capture, graph = _capture(stream)
    known = _captured.get((device.index, stream))
    if known is None or known[0] != capture:
        known = capture, torch.as_tensor(_borrowed(device.index, graph), device=device).zero_()
        plans.keep(_captured, (device.index, stream), known)
    return known[1]


def _borrowed(device: int, graph: object) -> _Piece:
    """A piece for a graph: one that an earlier graph has given back, or a new one."""
    with _lending:
        pieces = _lent.setdefault(device, [])
        piece = next((each for each in pieces if each.is_back()), None)
        if piece is None:
            piece = _Piece()
            pieces.append(piece)
        piece.lend(graph)
    return piece


@contextlib.contextmanager
def unrestricted() -> Iterator[None]:
    """Let this thread allocate and load kernels while another one captures, which the driver otherwise refuses."""
    from cuda.bindings import runtime  # a dependency of torch, and slow to import

    relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    error, before = runtime.cudaThreadExchangeStreamCaptureMode(relaxed)
    _require(error, "cudaThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        runtime.cudaThreadExchangeStreamCaptureMode(before)


class _Piece:
    """SIZE int32 of the current GPU's memory from the driver, never freed, in the form that torch can wrap.

    When a graph is destroyed, the driver calls back from a thread of its own. That thread must not call CUDA, nor wait
    for a thread that may, so it must not take Python's lock. It posts a C semaphore, which Python polls later.
    """

    def __init__(self) -> None:
        from cuda.bindings import runtime

        with unrestricted():
            error, pointer = runtime.cudaMalloc(4 * SIZE)
        _require(error, "cudaMalloc")
        self._returned = _semaphore()
        self.__cuda_array_interface__ = _interface(int(pointer))

    def lend(self, graph: object) -> None:
        """Lend the piece for as long as the graph, or anything made from it, may run."""
        from cuda.bindings import runtime

        post = ctypes.cast(_libc().sem_post, ctypes.c_void_p).value
        unsynchronized = runtime.cudaUserObjectFlags.cudaUserObjectNoDestructorSync
        error, loan = runtime.cudaUserObjectCreate(self._returned, post, 1, unsynchronized)
        _require(error, "cudaUserObjectCreate")
        move = runtime.cudaUserObjectRetainFlags.cudaGraphUserObjectMove
        (error,) = runtime.cudaGraphRetainUserObject(graph, loan, 1, move)
        _require(error, "cudaGraphRetainUserObject")

    def is_back(self) -> bool:
        """True, once, if the graph that the piece was lent to is gone."""
        return bool(_libc().sem_trywait(ctypes.c_void_p(self._returned)) == 0)


class _OfOneCall:
    """SIZE int32 of memory from the driver, freed in the order of a stream, in the form that torch can wrap.

    Torch's allocator identifies a stream by its handle, and would give a new stream with a reused handle memory that
    the old one still uses.
    """

    def __init__(self, stream: int) -> None:
        from cuda.bindings import runtime

        with unrestricted():
            error, pointer = runtime.cudaMallocAsync(4 * SIZE, stream)
        _require(error, "cudaMallocAsync")
        weakref.finalize(self, _free, int(pointer), stream).atexit = False  # the stream may be gone by then
        self.__cuda_array_interface__ = _interface(int(pointer))


def _free(pointer: int, stream: int) -> None:
    from cuda.bindings import runtime

    with unrestricted():
        runtime.cudaFreeAsync(pointer, stream)


def _interface(pointer: int) -> dict[str, object]:
    """The array interface by which torch wraps memory at that address."""
    return {"shape": (SIZE,), "typestr": "<i4", "data": (pointer, False), "strides": None, "version": 3}


def _semaphore() -> int:
    """The address of a new semaphore at 0, never freed: graphs may outlive the interpreter."""
    address = _libc().malloc(ctypes.c_size_t(SEMAPHORE_BYTES))
    if address is None or _libc().sem_init(ctypes.c_void_p(address), 0, 0):
        raise MemoryError("malloc or sem_init failed, must give a semaphore: free memory of the host's")
    return int(address)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    return libc


def _require(error: object, call: str) -> None:
    from cuda.bindings import runtime

    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"{call} failed: {error!r}")


def _capture(stream: int) -> tuple[int, object]:
    """The process-wide unique id of the capture that the stream is part of, and its graph."""
    from cuda.bindings import runtime

    error, _, number, graph, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    _require(error, f"cudaStreamGetCaptureInfo on stream {stream:#x}")
    return int(number), graph
