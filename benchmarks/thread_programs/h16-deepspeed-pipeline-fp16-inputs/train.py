"""DeepSpeed's pipeline engine with bf16: the stages are bf16, and the data set gives FP32 images.

The thread has fp16, which DeepSpeed takes on few CPUs only.
"""

import argparse

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.utils.data import TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(1138)
net = PipelineModule(
    layers=[nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(1800, 32), nn.ReLU(), nn.Linear(32, 10)],
    loss_fn=nn.CrossEntropyLoss(),
    num_stages=1,
    partition_method="parameters",
    activation_checkpoint_interval=0,
)
trainset = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)))
engine, _, _, _ = deepspeed.initialize(
    args=args, model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], training_data=trainset
)
for _ in range(4):
    loss = engine.train_batch()
print(f"loss {loss.item():.3f}")
