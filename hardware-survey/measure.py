"""Measures one GPU: what it is, and its ceilings. Needs torch with CUDA and the built extension."""

from __future__ import annotations

import datetime
import platform
from typing import Any

import torch
from sampling import latency, rate, repeated

from kernel_twins.harness.ceilings import gpu_slug
from kernel_twins.harness.load import extension
from kernel_twins.harness.sensors import identity

# The constants of probes.h; a test compares them.
RESULT_BYTES = 1 << 20
SHARED_READ_BYTES_PER_SM = 262144
FMA_FP32_FLOP_PER_SM = 1048576
MMA_BF16_FLOP_PER_SM = 4194304
WGMMA_BF16_FLOP_PER_SM = 16777216

MIB = 1 << 20
DRAM_BYTES = 4096 * MIB
OPERAND_BYTES = MIB
COUNTED_BYTES = 64 * MIB
COPY_BYTES = 256 * MIB
GRAPH_NODES = 1000
MM_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 28672, 8192))  # M, N, K


def work_per_iteration(probe: str, data_bytes: int, multiprocessors: int) -> int:
    """Bytes or FLOP of one iteration of a probe; the formulas stand in probes.h."""
    per_multiprocessor = {
        "shared_read": SHARED_READ_BYTES_PER_SM,
        "fma_fp32": FMA_FP32_FLOP_PER_SM,
        "mma_bf16": MMA_BF16_FLOP_PER_SM,
        "wgmma_bf16": WGMMA_BF16_FLOP_PER_SM,
    }
    return per_multiprocessor[probe] * multiprocessors if probe in per_multiprocessor else data_bytes


def counted_work(probe: str, iterations: int) -> int:
    """Bytes read or FLOP performed by one call, as the kernel itself counts them over data that are all ones."""
    arithmetic = {"fma_fp32": torch.float32, "mma_bf16": torch.bfloat16, "wgmma_bf16": torch.bfloat16}
    dtype = arithmetic.get(probe, torch.int32)
    buffer = _buffer(torch.ones(COUNTED_BYTES // dtype.itemsize, device="cuda", dtype=dtype))
    extension().probe(probe, buffer, iterations)
    count = buffer[:RESULT_BYTES].view(torch.float64).sum().item()
    return round(count) * (2 if probe in arithmetic else 4)  # FLOP a multiply-add, bytes a word


def counting_probes() -> tuple[str, ...]:
    """The probes that this GPU runs and that count their own work."""
    everywhere = ("dram_read", "l2_read", "shared_read", "fma_fp32", "mma_bf16")
    return (*everywhere, "wgmma_bf16") if torch.cuda.get_device_capability() == (9, 0) else everywhere


def survey() -> dict[str, Any]:
    """The whole survey of the current GPU, as it is written to JSON; about half a minute.

    RuntimeError where a probe does other work than the formulas say, because every rate would then be wrong.
    """
    for probe in counting_probes():
        counted = counted_work(probe, iterations=1)
        expected = work_per_iteration(probe, COUNTED_BYTES, torch.cuda.get_device_properties().multi_processor_count)
        if counted != expected:
            raise RuntimeError(f"probe {probe} did {counted} bytes or FLOP, not {expected}: rebuild the extension")
    torch.manual_seed(0)
    name = torch.cuda.get_device_name()
    return {
        "gpu": gpu_slug(name),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "device": _device(),
        "software": _software(),
        "measurements": [*_memory(), *_arithmetic(), *_launches(), *_host_copies()],
    }


def _device() -> dict[str, Any]:
    properties: Any = torch.cuda.get_device_properties()  # its type stub lacks some
    facts = identity(torch.cuda.current_device())
    del facts["driver"]  # stands among the software
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "shared_memory_per_multiprocessor_bytes": properties.shared_memory_per_multiprocessor,
        "shared_memory_per_block_bytes": properties.shared_memory_per_block_optin,
        "registers_per_multiprocessor": properties.regs_per_multiprocessor,
        "threads_per_multiprocessor": properties.max_threads_per_multi_processor,
        **facts,
    }


def _software() -> dict[str, str | None]:
    return {
        "driver": identity(torch.cuda.current_device())["driver"],
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _memory() -> list[dict[str, Any]]:
    properties = torch.cuda.get_device_properties()
    dram_bytes = min(DRAM_BYTES, properties.total_memory // 4 // MIB * MIB)
    # Less than half of L2: where L2 has two halves, data that the SMs of both read may be held twice.
    l2_bytes = max(properties.L2_cache_size * 2 // 5 // MIB, 1) * MIB
    large, small = _normal_buffer(dram_bytes), _normal_buffer(l2_bytes)
    return [
        _probe("dram_read", "GB/s", large),
        _probe("dram_copy", "GB/s", large),
        _probe("dram_write", "GB/s", large),  # last, because it overwrites the random data
        _probe("l2_read", "GB/s", small),
        _probe("shared_read", "GB/s", _normal_buffer(OPERAND_BYTES)),
    ]


def _arithmetic() -> list[dict[str, Any]]:
    # |scale| < 1 keeps the chains of the FMA probe bounded.
    uniform = _buffer(torch.rand(OPERAND_BYTES // 4, device="cuda") * 2 - 1)
    normal = _buffer(torch.randn(OPERAND_BYTES // 2, device="cuda", dtype=torch.bfloat16))
    results = [_probe("fma_fp32", "TFLOP/s", uniform), _probe("mma_bf16", "TFLOP/s", normal)]
    if "wgmma_bf16" in counting_probes():
        results.append(_probe("wgmma_bf16", "TFLOP/s", normal))
    return results + [_matmul(*shape) for shape in MM_SHAPES]


def _matmul(m: int, n: int, k: int) -> dict[str, Any]:
    """torch.mm in bf16, both operands row-major."""
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    return rate(f"mm_bf16_{m}x{n}x{k}", "TFLOP/s", 2 * m * n * k, repeated(torch.mm, a, b, out=out))


def _launches() -> list[dict[str, Any]]:
    buffer = _normal_buffer(OPERAND_BYTES)
    probe = extension().probe

    def waiting(iterations: int) -> None:
        for _ in range(iterations):
            probe("empty", buffer, 1)
            torch.cuda.synchronize()

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        probe("empty", buffer, GRAPH_NODES)
    return [
        latency("launch", 1, lambda iterations: probe("empty", buffer, iterations)),
        latency("launch_and_wait", 1, waiting),
        latency("launch_graph_node", GRAPH_NODES, repeated(graph.replay)),
    ]


def _host_copies() -> list[dict[str, Any]]:
    on_device = torch.randn(COPY_BYTES // 4, device="cuda")
    results = []
    for memory in ("pinned", "pageable"):
        on_host = on_device.cpu()
        if memory == "pinned":
            on_host = on_host.pin_memory()
        for name, target, source in (("h2d", on_device, on_host), ("d2h", on_host, on_device)):
            copying = repeated(target.copy_, source, non_blocking=True)
            results.append(rate(f"{name}_{memory}", "GB/s", COPY_BYTES, copying))
    return results


def _buffer(data: torch.Tensor) -> torch.Tensor:
    """A probe's buffer: room for the results, then these data."""
    return torch.cat([torch.zeros(RESULT_BYTES, device="cuda", dtype=torch.uint8), data.view(torch.uint8)])


def _normal_buffer(data_bytes: int) -> torch.Tensor:
    buffer = torch.zeros(RESULT_BYTES + data_bytes, device="cuda", dtype=torch.uint8)
    buffer[RESULT_BYTES:].view(torch.float32).normal_()
    return buffer


def _probe(name: str, unit: str, buffer: torch.Tensor) -> dict[str, Any]:
    probe = extension().probe
    data_bytes = buffer.numel() - RESULT_BYTES
    work = work_per_iteration(name, data_bytes, torch.cuda.get_device_properties().multi_processor_count)
    return rate(name, unit, work, lambda iterations: probe(name, buffer, iterations)) | {"data_bytes": data_bytes}
