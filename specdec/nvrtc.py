"""CUDA C++ kernels compiled while running, by the NVRTC library that PyTorch brings, and launched by the driver.

No CUDA toolkit is needed. Errors are RuntimeError with what the compiler or the driver says.
"""

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_MOST_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class Kernel:
    """One function of a source. shared_bytes: of dynamic shared memory a block."""

    def __init__(self, source: str, name: str, options: Sequence[str], *, shared_bytes: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._shared_bytes = shared_bytes
        torch.cuda.current_stream()  # the device's context is there
        image = compiled(source, tuple(options))
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._ask("cuModuleLoadData", ctypes.byref(self._module), image)
        self._ask("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
        self._ask("cuFuncSetAttribute", self._function, _MOST_SHARED_MEMORY, shared_bytes)

    def launch(self, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        """On the current stream, all blocks on the device at once. arguments: CUDA tensors, by their address; None, a
        null pointer; or ctypes values."""
        places, _values = addresses(arguments)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = (blocks, 1, 1, threads, 1, 1, self._shared_bytes)
        self._ask("cuLaunchCooperativeKernel", self._function, *sizes, stream, places)

    def _ask(self, call: str, *arguments: Any) -> None:
        if code := getattr(self._driver, call)(*arguments):
            said = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(said))
            raise RuntimeError(f"{call}: {(said.value or b'unknown error').decode()}")


def addresses(arguments: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Where each of a launch's arguments lies, and what lies there, which has to outlive the call."""
    values = [
        ctypes.c_void_p(each.data_ptr() if each is not None else None)
        if each is None or isinstance(each, torch.Tensor)
        else each
        for each in arguments
    ]
    return (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values)), values


@lru_cache
def compiled(source: str, options: tuple[str, ...]) -> bytes:
    """The code for the device that --gpu-architecture names; once a process, since engines are made again and again."""
    library = _library()
    program = ctypes.c_void_p()
    made = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    if made:
        raise RuntimeError(f"nvrtcCreateProgram: error {made}")
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    if library.nvrtcCompileProgram(program, len(options), given):
        raise RuntimeError(_text(library, program).strip() or "NVRTC gave no reason")
    size = ctypes.c_size_t()
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, image)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


def _text(library: Any, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    return log.value.decode(errors="replace")


def _library() -> Any:
    """libnvrtc by its name, or from the package that pip installed it with."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        spec = importlib.util.find_spec("nvidia")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in sorted(Path(folder).glob(f"*/lib/{name}")):
                return ctypes.CDLL(str(path))
    raise RuntimeError(f"{name} was not found")
