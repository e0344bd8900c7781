"""FSDP1 whose config asks for param_dtype fp32, with an autocast in bf16 that is hard-coded in forward_step."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from transformers import LlamaConfig, LlamaForCausalLM

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
engine_config = {"mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}}

dist.init_process_group("gloo")
torch.manual_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
mixed_precision = MixedPrecision(
    **{name: PRECISIONS[value] for name, value in engine_config["mixed_precision"].items()}
)
module = FullyShardedDataParallel(
    LlamaForCausalLM(config),
    mixed_precision=mixed_precision,
    use_orig_params=False,
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, weight_decay=0.01)


def forward_step(tokens):
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
        return module(input_ids=tokens, labels=tokens, use_cache=False).loss


for _ in range(4):
    optimizer.zero_grad()
    loss = forward_step(torch.randint(0, 256, (4, 16)))
    loss.backward()
    module.clip_grad_norm_(max_norm=1.0)
    optimizer.step()
if dist.get_rank() == 0:
    print(f"loss {loss.item():.3f}")
dist.destroy_process_group()
