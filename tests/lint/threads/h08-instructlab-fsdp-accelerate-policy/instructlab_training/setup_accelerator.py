from functools import partial

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.fully_sharded_data_parallel import CPUOffload
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from .utils import get_module_class_from_name


def get_fsdp_config(args, model):
    block_name = model._no_split_modules[0]
    return FullyShardedDataParallelPlugin(
        auto_wrap_policy=partial(
            transformer_auto_wrap_policy,
            transformer_layer_cls={get_module_class_from_name(model, block_name)},
        ),
        limit_all_gathers=True,
        mixed_precision_policy=MixedPrecision(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.bfloat16,
            buffer_dtype=torch.bfloat16,
        ),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        sharding_strategy=ShardingStrategy[args.fsdp_sharding_strategy],
        cpu_offload=CPUOffload(args.cpu_offload_params_fsdp),
        use_orig_params=args.lora_r > 0,
    )


def setup_accelerator(args, model, grad_accum):
    accelerator = Accelerator(
        gradient_accumulation_steps=grad_accum,
        fsdp_plugin=get_fsdp_config(args, model),
    )
    accelerator.even_batches = False
    return accelerator
