"""Memory that kernels need beside their operands and that must hold a value from one launch to the next."""

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

SIZE = 16384  # int32: up to 9 for each program that can run at once
COUNTERS = 2048  # of them serve tiles that programs share
SEMAPHORE_BYTES = 128  # of C's sem_t, and more: glibc's has 32

_counters: dict[tuple[int, int], Tensor] = {}  # by GPU and stream, of torch's streams, which live as long as it does
_captured: dict[tuple[int, int], tuple[int, Tensor]] = {}  # the same and the capture's number, of streams that capture
_lent: dict[int, list[_Piece]] = {}  # by GPU, to graphs
_lending = threading.Lock()


def counter(device: torch.device) -> Tensor:
    """SIZE int32 that are 0 when a kernel on the current stream starts, if every kernel leaves them so.

    Each stream has its own, so that kernels under way at the same time never share one. So has each call on a stream
    that is not torch's, which may be destroyed while it works, its handle becoming another's; and so has each graph:
    under capture they are zeroed inside it, once for a stream, and lent until it and all that was made of it are gone.

    What is kept comes from the driver: memory of torch's that is kept makes its graph trees refuse the graph, or is
    handed out again with it.
    """
    if device.type != "cuda":
        return torch.zeros(SIZE, dtype=torch.int32, device=device)
    stream = driver.active.get_current_stream(device.index)
    if torch.cuda.is_current_stream_capturing():
        return _of_capture(device, stream)
    known = _counters.get((device.index, stream))
    if known is None:
        current = torch.cuda.current_stream(device)
        if current.stream_id == stream != 0:  # torch numbers its own, and takes another's handle for its number
            return torch.as_tensor(_OfOneCall(stream), device=device).zero_()
        known = torch.as_tensor(_Piece(), device=device).zero_()
        current.synchronize()  # a search goes on on a stream of its own
        _counters[device.index, stream] = known
    return known


def _of_capture(device: torch.device, stream: int) -> Tensor:
    """Those of the stream in this capture: one that was given up never zeroed its own, so no other may take them."""
    capture, graph = _capture(stream)
    known = _captured.get((device.index, stream))
    if known is None or known[0] != capture:
        known = capture, torch.as_tensor(_borrowed(device.index, graph), device=device).zero_()
        plans.keep(_captured, (device.index, stream), known)
    return known[1]


def _borrowed(device: int, graph: object) -> _Piece:
    """A piece for a graph: one that a graph before it has given back, or a new one."""
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
    """While any thread captures, the driver neither allocates nor loads kernels, unless this one says that it knows."""
    from cuda.bindings import runtime  # a dependency of torch, and slow to import

    relaxed = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    error, before = runtime.cudaThreadExchangeStreamCaptureMode(relaxed)
    _require(error, "cudaThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:
        runtime.cudaThreadExchangeStreamCaptureMode(before)


class _Piece:
    """Memory of the current GPU's from the driver, never freed, as torch takes it over: int32.

    A graph that is gone calls back from a thread of the driver's, which must neither call the driver nor wait for who
    may, as Python's lock would make it. So it posts a semaphore, which is C's alone, and Python asks that later.
    """

    def __init__(self) -> None:
        from cuda.bindings import runtime

        with unrestricted():
            error, pointer = runtime.cudaMalloc(4 * SIZE)
        _require(error, "cudaMalloc")
        self._returned = _semaphore()
        self.__cuda_array_interface__ = _interface(int(pointer))

    def lend(self, graph: object) -> None:
        """For as long as the graph, or anything made from it, may run."""
        from cuda.bindings import runtime

        post = ctypes.cast(_libc().sem_post, ctypes.c_void_p).value
        unsynchronized = runtime.cudaUserObjectFlags.cudaUserObjectNoDestructorSync
        error, loan = runtime.cudaUserObjectCreate(self._returned, post, 1, unsynchronized)
        _require(error, "cudaUserObjectCreate")
        move = runtime.cudaUserObjectRetainFlags.cudaGraphUserObjectMove
        (error,) = runtime.cudaGraphRetainUserObject(graph, loan, 1, move)
        _require(error, "cudaGraphRetainUserObject")

    def is_back(self) -> bool:
        """Whether what it was lent to is gone; asked once, it is taken."""
        return bool(_libc().sem_trywait(ctypes.c_void_p(self._returned)) == 0)


class _OfOneCall:
    """Memory from the driver that is given back in the order of a stream, as torch takes it over: int32.

    Torch's allocator knows a stream by its handle, and would hand out to a new one what the old one still uses.
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
    """What torch takes that memory over by."""
    return {"shape": (SIZE,), "typestr": "<i4", "data": (pointer, False), "strides": None, "version": 3}


def _semaphore() -> int:
    """Where one lies that nobody has posted, for ever: graphs may outlive the interpreter."""
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
    """The number of the capture that the stream is part of, which no other capture of this process has; its graph."""
    from cuda.bindings import runtime

    error, _, number, graph, *_ = runtime.cudaStreamGetCaptureInfo(stream)
    _require(error, f"cudaStreamGetCaptureInfo on stream {stream:#x}")
    return int(number), graph
