"""The processes of a training and how weights lie on them: FSDP2 or DDP, bfloat16 with float32 masters."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from pipeline.config_train import RecipeConfig

# Dense bfloat16 products, FLOP/s, from NVIDIA's data sheets
PEAK_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12}


def make_accelerator(recipe: RecipeConfig) -> Accelerator:
    """One process, or those that the launcher's RANK and WORLD_SIZE name: on GPUs over NCCL, else on CPUs over gloo.

    With more than one, weights, gradients and optimiser are sharded over them (`fully_shard`) unless the recipe says
    ddp. Weights are float32 and are cast to bfloat16 for the products; gradients are reduced in float32.
    """
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # left by a recipe that was sharded, for all that follow
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # they keep the settings of the process's last recipe
    is_gpu = torch.cuda.is_available()
    precision = recipe.precision
    if precision == "auto":
        precision = "bfloat16" if is_gpu else "float32"
    low = torch.bfloat16 if precision == "bfloat16" else None
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32),
    )
    sharded = recipe.sharding == "fsdp" and PartialState(cpu=not is_gpu).num_processes > 1
    accelerator = Accelerator(
        cpu=not is_gpu, mixed_precision="bf16" if low else "no", fsdp_plugin=plugin if sharded else None
    )
    if sharded and accelerator.distributed_type != DistributedType.FSDP:
        # accelerate shards over GPUs only; fully_shard itself works over gloo, and the same code is then tested there
        for state in (PartialState._shared_state, accelerator.state._shared_state):
            state["distributed_type"] = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def sum_over_processes(values: Tensor) -> Tensor:
    """The elementwise sum over all processes, on each of them."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def whole_weights(model: Any) -> dict[str, Tensor]:
    """Every weight, gathered, on the CPU of the first process (an empty dict on the others); tied ones once."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def peak_flops() -> float | None:
    """This GPU's dense bfloat16 FLOP/s; None on a CPU or an unlisted GPU."""
    if not torch.cuda.is_available():
        return None
    words = torch.cuda.get_device_name().replace("-", " ").split()
    return next((PEAK_FLOPS[word] for word in words if word in PEAK_FLOPS), None)
