"""A CUDA graph for tests on a CPU: the operations of one call on a tape, done again on the same tensors.

Like a graph, a replay runs no Python of the captured function: what Python decided or read at the capture (a length, a
number of drafts, a tensor that was replaced since) stays as it was then. What a graph cannot hold ends the capture.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
HOST_READS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal")


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Tape:
    """A specdec.capture.Capture. outside: by storage, the tensors that any tape read or wrote and did not make."""

    def __init__(self) -> None:
        self.outside: dict[int, Tensor] = {}

    def __call__(self, run: Callable[[], T], before: Callable[[], object]) -> Callable[[], T]:
        before()
        run()
        before()
        recorder = _Recorder()
        with recorder:
            result = run()
        self.outside |= recorder.outside
        # What a call leaves behind must not help the first replay.
        for made in recorder.made.values():
            made.fill_(True) if made.dtype == torch.bool else made.fill_(77)

        def replay() -> T:
            for operation in recorder.operations:
                operation()
            return result

        return replay

    def used_bytes(self) -> int:
        return 0


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Callable[[], None]] = []
        self.made: dict[int, Tensor] = {}  # by storage
        self.outside: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.removeprefix("aten::") in HOST_READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        given = list(_tensors((args, kwargs)))
        self.outside |= {storage(t): t for t in given if storage(t) not in self.made}
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self.operations.append(lambda: func(*args, **kwargs))
            return result
        known = {storage(t) for t in given}
        fresh = [storage(t) not in known for t in _tensors(result)]
        self.made |= {storage(t): t for t, is_new in zip(_tensors(result), fresh, strict=True) if is_new}
        if any(fresh):  # else views, which stay what they are

            def again() -> None:
                for old, new in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                    if storage(old) != storage(new):
                        old.copy_(new)

            self.operations.append(again)
        return result


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
