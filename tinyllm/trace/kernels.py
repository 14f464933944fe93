"""The operators of torch below a line of source: what ``--ops`` shows, in order of time, for each call."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tinyllm.trace.shape_text import in_numbers


class KernelWatch(TorchDispatchMode):
    """Tells `on_kernel` of every operator that runs while the mode is on: ``aten.bmm`` and the sizes of what it gave.

    A result that shares its argument's memory by the operator's own declaration is marked ``view``. `is_paused` lets
    the tracer's own arithmetic pass unseen.
    """

    def __init__(self, on_kernel: Callable[[str], None]):
        super().__init__()
        self.on_kernel = on_kernel
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run the operator, then report it; one that torch composes of others is those others."""
        arguments = kwargs or {}
        if self.is_paused:
            return func(*args, **arguments)
        with self:
            result = func.decompose(*args, **arguments)
        if result is NotImplemented:
            result = func(*args, **arguments)
            self.on_kernel(describe_kernel(func, result))
        return result


def describe_kernel(func: Any, result: Any) -> str:
    """The operator's name and the sizes of what it gave."""
    tensors = [item for item in (result if isinstance(result, tuple | list) else [result]) if isinstance(item, Tensor)]
    shapes = " ".join(in_numbers(tensor.shape) for tensor in tensors)
    return str(func.overloadpacket) + (f" -> {shapes}" if shapes else "") + (" view" if _is_view(func) else "")


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
