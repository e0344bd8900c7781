"""FP16 with dynamic loss scaling; the inputs are cast to the dtype that the engine's parameters have."""

import deepspeed
import torch


def train(net, loader):
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "min_loss_scale": 1,
        },
    }
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    criterion = torch.nn.CrossEntropyLoss()
    for inputs, labels in loader:
        inputs, labels = inputs.to(engine.device), labels.to(engine.device)
        if engine.fp16_enabled():
            inputs = inputs.half()
        loss = criterion(engine(inputs), labels)
        engine.backward(loss)
        engine.step()
