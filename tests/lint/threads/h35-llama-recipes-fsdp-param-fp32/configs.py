from dataclasses import dataclass

from torch.distributed.fsdp import ShardingStrategy


@dataclass
class train_config:
    model_name: str = "PATH/to/LLAMA/34B"
    enable_fsdp: bool = True
    batch_size_training: int = 4
    context_length: int = 4096
    num_epochs: int = 3
    num_workers_dataloader: int = 1
    lr: float = 1e-4
    weight_decay: float = 0.0
    gamma: float = 0.85
    seed: int = 42
    use_fp16: bool = False
    mixed_precision: bool = True
    dataset_path: str = "data/samsum.json"
    output_dir: str = "out"


@dataclass
class fsdp_config:
    mixed_precision: bool = True
    use_fp16: bool = False
    pure_bf16: bool = False
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    fsdp_activation_checkpointing: bool = True
    fsdp_cpu_offload: bool = False
