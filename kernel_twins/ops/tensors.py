"""Making and checking the tensors that operations take."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.nn import Parameter

from kernel_twins.spec import Case, Op

DTYPE: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OUT_DTYPE: dict[str, torch.dtype] = DTYPE | {"int64": torch.int64}  # argmax's indices; no input has this dtype
_NAME = {dtype: name for name, dtype in DTYPE.items()}


def name_of(dtype: torch.dtype) -> str:
    """The short name of a dtype that tensors may have here."""
    return _NAME[dtype]


def normal(case: Case, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Standard normal values of the case's dtype on the generator's device, row-major.

    ``offset`` in the variant starts the tensor that many elements into its storage, so that its address is not a
    multiple of 16 bytes; ``values`` puts one ``inf``, ``nan``, or one of each sign of infinity (``infs``) inside, or
    leaves ones in the last five places and zeros elsewhere (``tail``), so that a sum that misses one is far off.
    """
    offset = int(case.get("offset", "0"))
    size = math.prod(shape)
    storage = torch.empty(offset + size, dtype=DTYPE[case.dtype], device=generator.device)
    flat = storage[offset:]
    flat.normal_(generator=generator)
    if case.get("values") == "tail":
        flat.zero_()
        flat[-5:] = 1
    special = {"inf": [math.inf], "nan": [math.nan], "infs": [math.inf, -math.inf]}.get(case.get("values"), [])
    for index, value in enumerate(special[:size]):
        flat[(size // 2 + index) % size] = value
    return flat.view(shape)


def borders(size: int) -> Tensor:
    """Places at which a kernel may divide its work: both ends, multiples of 256, and of a 16th of the size."""
    edges = torch.cat([torch.arange(0, size, 256), torch.arange(17) * size // 16])
    places: Tensor = torch.cat([edges - 1, edges]).unique()
    return places[(places >= 0) & (places < size)]


def chain(additions: float) -> float:
    """The weight of a sum's magnitude among its terms, if a loop makes that many additions: see check.py."""
    return math.sqrt(additions) / 4


def empty_outputs(op: Op, case: Case, device: str | torch.device) -> Tensor | tuple[Tensor, ...]:
    """A call's ``out``, not initialised: a tensor, or a tuple of tensors where the op has several outputs."""
    outputs = tuple(torch.empty(each.shape, dtype=OUT_DTYPE[each.dtype], device=device) for each in op.outputs(case))
    return outputs[0] if len(outputs) == 1 else outputs


def remedy_of(name: str, method: str) -> str:
    """The remedy for an argument. An output must be allocated anew: the result in a converted copy would be lost."""
    is_result = name == "out" or name.startswith("out[")
    return "allocate it so with torch.empty" if is_result else f"call {name}.{method}"


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...], remedy: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must have {shape}: {remedy}")


def require_rank(name: str, tensor: Tensor, rank: int) -> None:
    if tensor.dim() != rank:
        raise ValueError(f"{name} has {tensor.dim()} dimensions, must have {rank}")


def require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, must be a torch.Tensor: call torch.as_tensor({name})")


def require_dtype(name: str, tensor: Tensor, *dtypes: str) -> None:
    require_tensor(name, tensor)
    if tensor.dtype not in [OUT_DTYPE[dtype] for dtype in dtypes]:
        accepted = " or ".join(str(OUT_DTYPE[dtype]) for dtype in dtypes)
        raise TypeError(f"{name} is {tensor.dtype}, must be {accepted}: {remedy_of(name, 'to(...)')}")


def require_same_dtype(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    if tensor.dtype != other.dtype:
        remedy = remedy_of(name, f"to({other_name}.dtype)")
        raise TypeError(f"{name} is {tensor.dtype}, must be {other.dtype} like {other_name}: {remedy}")


def require_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}, must be contiguous: {remedy_of(name, 'contiguous()')}")


def require_apart(out: Tensor, name: str, tensor: Tensor) -> None:
    """out must share no memory with an input that is read after out is first written."""
    (out_begin, out_end), (begin, end) = _extent(out), _extent(tensor)
    if out_begin < end and begin < out_end and out.numel() and tensor.numel():
        raise ValueError(f"out overlaps {name} in memory, must be apart from it: allocate it with torch.empty")


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor and the one past its last."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def require_device(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    if tensor.device != like.device:
        remedy = remedy_of(name, f"to({like_name}.device)")
        raise ValueError(f"{name} is on {tensor.device}, must be on {like.device} like {like_name}: {remedy}")


def require_values(name: str, value: object) -> None:
    """Refuses sparse and lazily negated tensors and tensor subclasses: steps read memory through a pointer.

    Values that are no tensors pass.
    """
    if not isinstance(value, Tensor):
        return
    if value.layout != torch.strided:
        raise ValueError(f"{name} has layout {value.layout}, must be torch.strided: {remedy_of(name, 'to_dense()')}")
    if value.is_neg():
        raise ValueError(f"{name} is negated lazily, must hold its values: {remedy_of(name, 'resolve_neg()')}")
    if type(value) not in (Tensor, Parameter):
        remedy = "pass the torch.Tensor that holds the values"
        raise TypeError(f"{name} is a {type(value).__name__}, must be a torch.Tensor: {remedy}")


def require_cuda(name: str, tensor: Tensor, otherwise: str = "") -> None:
    """The tensor must be on a GPU; ``otherwise`` names another remedy for the message."""
    if not tensor.is_cuda:
        remedy = " or ".join(filter(None, (remedy_of(name, "cuda()"), otherwise)))
        raise ValueError(f"{name} is on {tensor.device}, must be on a CUDA device: {remedy}")
