"""Torch's operators for CUDA, on the stand-in: each runs the CPU's on the same bytes.

An operator computes when it is called, on what all that was queued before it on its stream has left
in memory. Its results come into the memory of the device later, when the stream gets there: who
does not wait for the stream reads what was there before. Copies between host and device are torch's
own.
"""

import ctypes
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_KEPT: list[Any] = []  # registrations and names, for the life of the process
# called at each operator with the kernels that a GPU would launch, and the bytes read and written
WATCHERS: list[Callable[[int, int], None]] = []
# What only describes or provides memory needs no kernel, and torch's own is right.
_OWN = re.compile(
    r"_?(new_)?empty.*|as_strided.*|view|set_|resize_|unfold|_local_scalar_dense|is_pinned|_pin_memory|is_set_to|copy_"
    r"|record_stream|(_?cudnn|_?miopen|_nested|_flash|_efficient|_scaled_dot|_thnn|_fft|_linalg|_sparse|quant|fbgemm).*"
)
# These have one implementation for all devices, which would ask for cuDNN here.
_COMPOSITE = ("convolution", "convolution_backward", "convolution_overrideable")
_OVERWRITES = re.compile(rb"\.(_foreach_)?(copy|zero|fill)_|out$")  # without a look at it
_CPU_KERNELS = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def install() -> None:
    """Replace the operators when torch starts CUDA in this process; others do not pay for it."""
    torch.backends.cudnn.enabled = False
    if torch.cuda.device_count() > 0:
        torch.cuda._lazy_call(_replace)


def _replace() -> None:
    torch.set_num_threads(1)  # the number of threads changes the order of sums inside an operator
    library = torch.library.Library("aten", "IMPL")
    _KEPT.append(library)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        if not full.startswith("aten::"):
            continue
        name, _, overload = full[6:].partition(".")
        if _OWN.fullmatch(name) or not (name in _COMPOSITE or has_kernel(full, "CUDA")):
            continue
        if not any(has_kernel(full, key) for key in _CPU_KERNELS):
            continue
        operator = getattr(getattr(torch.ops.aten, name), overload or "default")
        if any(
            result.alias_info and not result.alias_info.is_write
            for result in operator._schema.returns
        ):
            continue  # a view
        library.impl(full[6:], _kernel(operator), "CUDA", allow_override=True)
    library.impl("copy_", _copy, "CUDA", allow_override=True)


def _kernel(operator: Any) -> Callable[..., Any]:
    """Return what runs an operator of torch on tensors of the stand-in."""
    name = str(operator).encode()
    _KEPT.append(name)
    arguments = operator._schema.arguments
    written = {
        n
        for n, argument in enumerate(arguments)
        if argument.alias_info and argument.alias_info.is_write
    }
    names = {argument.name for n, argument in enumerate(arguments) if n in written}
    # Torch takes a whole number for some of its tensors, but not when it is called like this.
    of_tensors = {n for n, argument in enumerate(arguments) if str(argument.type) == "Tensor"}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = _Call(_device_of((args, kwargs)), name)
        launches = _launches(operator, args)
        given = [
            torch.tensor(value) if n in of_tensors and isinstance(value, int) else value
            for n, value in enumerate(args)
        ]
        inputs = [call.taken(value, n in written) for n, value in enumerate(given)]
        named = {key: call.taken(value, key in names) for key, value in kwargs.items()}
        result = call.given(operator(*inputs, **named))
        for watcher in WATCHERS:
            watcher(launches, call.num_bytes)
        return result

    return kernel


def _launches(operator: Any, arguments: Any) -> int:
    """Return the kernels of an operator on lists of tensors: one for all, if their types and
    strides allow it; else one for each.

    A GPU launches a few for many tensors, as the arguments of a kernel hold some dozens.
    """
    if "foreach" not in operator.__name__:
        return 1
    lists = [each for each in arguments if isinstance(each, (list, tuple)) and each]
    lists = [each for each in lists if all(isinstance(one, Tensor) for one in each)]
    types = [{one.dtype for one in each} for each in lists]
    if "copy" not in operator.__name__:  # a copy may change the type
        types = [set().union(*types)]
    strides = [{one.stride() for one in row} for row in zip(*lists, strict=False)]
    is_fast = all(len(each) == 1 for each in types + strides)
    return 1 if is_fast else max(map(len, lists))


class _Call:
    """One launch: it holds the operands in host memory and the places
    where the results are to come.
    """

    def __init__(self, device: int, name: bytes) -> None:
        self._device = device
        self._name = name
        self._stream = torch._C._cuda_getCurrentRawStream(device)
        self._reads: list[Tensor] = []
        self._writes: list[tuple[Tensor, Tensor]] = []
        self._own: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_bytes = 0  # read and written
        _LIBRARY.fake_gpu_launch(device, self._stream)

    def taken(self, value: Any, is_written: bool) -> Any:
        if isinstance(value, Tensor):
            if value.device.type != "cuda":
                return value
            operand = _seen_from_host(value)
            self._reads.append(value)
            if is_written:
                if _is_dense(value):
                    operand = torch.empty_strided(
                        value.size(), value.stride(), dtype=value.dtype
                    ).copy_(operand)
                self._writes.append((value, operand))
            self._own[id(operand)] = (operand, value)
            return operand
        if isinstance(value, (list, tuple)):
            return [self.taken(one, is_written) for one in value]
        if isinstance(value, torch.device) and value.type == "cuda":
            return torch.device("cpu")
        if isinstance(value, torch.Generator) and value.device.type == "cuda":
            return None
        return value

    def given(self, result: Any) -> Any:
        """Return the results of the CPU's operator as tensors of the device,
        whose content is on its way.
        """
        for target, operand in self._writes:
            if target.size() != operand.size():  # an `out` that had another size
                target.resize_(operand.size())
        returned = self._returned(result)
        inputs = [_span(tensor) for tensor in self._reads]
        targets = [_span(target) for target, _ in self._writes]
        sources = [
            0 if target.data_ptr() == own.data_ptr() else own.data_ptr()
            for target, own in self._writes
        ]
        self.num_bytes = sum(size for _, size in inputs + targets)
        if _OVERWRITES.search(self._name):
            self.num_bytes -= sum(size for span, size in targets if (span, size) in inputs)
        begins, sizes = _columns(targets)
        written = len(targets), begins, _array(ctypes.c_void_p, sources), sizes
        _LIBRARY.fake_gpu_effects(
            self._device, self._stream, self._name, len(inputs), *_columns(inputs), *written
        )
        return returned

    def _returned(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            if id(result) in self._own:
                return self._own[id(result)][1]
            device = torch.device("cuda", self._device)
            if not _is_dense(result):
                result = result.contiguous()
            target = torch.empty_strided(
                result.size(), result.stride(), dtype=result.dtype, device=device
            )
            self._writes.append((target, result))
            return target
        if isinstance(result, (list, tuple)):
            return type(result)(self._returned(one) for one in result)
        return result


def _copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy as torch does where the host takes part, and as an operator within a device."""
    if self.device == source.device:
        result: Tensor = _COPY_ON_DEVICE(self, source, non_blocking)
        return result
    torch.ops.aten.copy_.default._op_dk(
        torch._C.DispatchKey.CompositeExplicitAutograd, self, source, non_blocking
    )
    return self


_COPY_ON_DEVICE = _kernel(torch.ops.aten.copy_.default)


def _device_of(values: Any) -> int:
    for value in _leaves(values):
        if isinstance(value, Tensor) and value.device.type == "cuda":
            return int(value.device.index)
    for value in _leaves(values):
        if isinstance(value, torch.device) and value.type == "cuda" and value.index is not None:
            return int(value.index)
    return torch.cuda.current_device()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    for one in value:
        yield from _leaves(one)


def _seen_from_host(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    host = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    return torch.empty(0, dtype=tensor.dtype).set_(
        host, tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def _extent(tensor: Tensor) -> int:
    """Return the number of elements between the first and the last of a tensor, both counted."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )


def _is_dense(tensor: Tensor) -> bool:
    return _extent(tensor) == tensor.numel()


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return where the bytes of a tensor begin, and how many there are
    from the first to the last.
    """
    return tensor.data_ptr(), _extent(tensor) * tensor.element_size()


def _array(kind: Any, values: list[int]) -> Any:
    return (kind * len(values))(*values)


def _columns(spans: list[tuple[int, int]]) -> tuple[Any, Any]:
    return _array(ctypes.c_void_p, [begin for begin, _ in spans]), _array(
        ctypes.c_size_t, [size for _, size in spans]
    )


def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)  # it has been preloaded
    stream = ctypes.c_void_p
    device = ctypes.c_int
    count = ctypes.c_int
    pointers = ctypes.POINTER(ctypes.c_void_p)
    sizes = ctypes.POINTER(ctypes.c_size_t)
    library.fake_gpu_launch.argtypes = [device, stream]
    library.fake_gpu_effects.argtypes = [
        *(device, stream, ctypes.c_char_p),
        *(count, pointers, sizes),
        *(count, pointers, pointers, sizes),
    ]
    library.fake_gpu_launch.restype = library.fake_gpu_effects.restype = None
    return library


_LIBRARY = _library()
