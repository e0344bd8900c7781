"""The engine runs forward, backward and step; precision is set in its config."""

import argparse

import deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
    "gradient_clipping": 1.0,
}


def main(net, dataset):
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    model_engine, optimizer, loader, _ = deepspeed.initialize(
        args=args, model=net, model_parameters=net.parameters(), training_data=dataset, config=CONFIG
    )
    for batch, labels in loader:
        batch, labels = batch.to(model_engine.local_rank), labels.to(model_engine.local_rank)
        loss = model_engine(batch, labels)
        model_engine.backward(loss)
        model_engine.step()
    model_engine.save_checkpoint("checkpoints")
