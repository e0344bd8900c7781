"""Train, save and continue; then start again, load and continue, and compare both. For each engine in the arguments.

    python resume.py POLICY ENGINE ...      on one rank, or under torchrun

It uses a GPU if there is one; the policies of Transformer Engine need it. The second model starts from other weights,
so only the loaded state can make it equal.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import mpguard

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import fake_delayed_scaling
import fake_te_weights

POLICIES = {
    "torchao": mpguard.Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True),
    "rowwise": mpguard.Policy(bf16=True, fp8="e4m3", fp8_recipe="rowwise", fp8_emulate=True),
    "delayed": fake_delayed_scaling.POLICY,
    "te-delayed": mpguard.Policy(bf16=True, fp8="hybrid", fp8_recipe="delayed", fp8_amax_history_len=4, backend="te"),
    "te-tensorwise": mpguard.Policy(bf16=True, fp8="hybrid", backend="te"),
    "fake_te": fake_te_weights.CURRENT,
}
POLICIES |= {f"{name}-kept": POLICIES[name].replace(fp8_param=True) for name in ("te-delayed", "te-tensorwise")}
STEPS = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        y: torch.Tensor = self.lm_head(x)
        return y


KEYS = sorted(Net().state_dict())


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().to(DEVICE)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer, with master weights if parameters are kept in FP8."""
    if sys.argv[1] == "fake_te":
        return fake_te_weights.Adam(model.parameters(), lr=1e-2, master_weights=True)
    if sys.argv[1].endswith("-kept"):
        from transformer_engine.pytorch.optimizers import FusedAdam

        made: torch.optim.Optimizer = FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
        return made
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randint(0, 64, (4, 13), generator=torch.Generator().manual_seed(100 * step + rank)).to(DEVICE)


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Plain:
    """A custom training loop."""

    def __init__(self, seed: int) -> None:
        self.model: Any = net(seed)
        self.optimizer: Any = adam(self.model)

    def step(self, number: int) -> float:
        tokens = batch(number)
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = self.model(tokens[:, :-1])
        loss = loss_of(logits, tokens)
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def save(self, folder: Path) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(state, folder / "all.pt")

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "all.pt")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def weights(self) -> dict[str, torch.Tensor]:
        return {key.removeprefix("module."): value.clone() for key, value in self.model.state_dict().items()}

    def others(self, folder: Path) -> list[str]:
        """The keys of the weights in the checkpoint, read without mpguard."""
        return [key.removeprefix("module.") for key in torch.load(folder / "all.pt")["model"]]


class Early(Plain):
    """Loads the weights before there is an optimizer, that is: before the conversion."""

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "all.pt")
        self.model = net(2)
        self.model.load_state_dict(saved["model"])
        self.optimizer = adam(self.model)
        self.optimizer.load_state_dict(saved["optimizer"])


class Forgetful(Plain):
    """Save plain tensors of the model: the history is lost, which must be warned about, and must change the result."""

    def save(self, folder: Path) -> None:
        model = {**self.model.state_dict()}
        torch.save({"model": model, "optimizer": self.optimizer.state_dict()}, folder / "all.pt")


class Safetensors(Plain):
    """Bare tensors, and the history by its functions."""

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(self.model.state_dict(), folder / "model.safetensors")
        torch.save([self.optimizer.state_dict(), mpguard.fp8_state_dict(self.model)], folder / "rest.pt")

    def load(self, folder: Path) -> None:
        from safetensors.torch import load_file

        self.model.load_state_dict(load_file(folder / "model.safetensors"))
        optimizer, history = torch.load(folder / "rest.pt")
        self.optimizer.load_state_dict(optimizer)
        mpguard.load_fp8_state_dict(self.model, history)

    def others(self, folder: Path) -> list[str]:
        from safetensors.torch import load_file

        return list(load_file(folder / "model.safetensors"))


class Ddp(Plain):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.model = nn.parallel.DistributedDataParallel(self.model)


class Accelerated(Plain):
    """accelerate's `save_state` and `load_state`."""

    def __init__(self, seed: int) -> None:
        from accelerate import Accelerator

        super().__init__(seed)
        self.accelerator = Accelerator(cpu=DEVICE == "cpu")
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))

    def others(self, folder: Path) -> list[str]:
        from safetensors.torch import load_file

        return list(load_file(folder / "model.safetensors"))


class AcceleratedZero2(Accelerated):
    """DeepSpeed under accelerate: with one process it is applied on the CPU too."""

    def __init__(self, seed: int) -> None:
        from accelerate import Accelerator, DeepSpeedPlugin
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", **alone}
        Plain.__init__(self, seed)
        self.accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
        self.accelerator.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 4
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def step(self, number: int) -> float:
        tokens = batch(number)
        loss = loss_of(self.model(tokens[:, :-1]), tokens)
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def others(self, folder: Path) -> list[str]:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return list(get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="pytorch_model"))


class AcceleratedFsdp2(Accelerated):
    """accelerate applies FSDP on a GPU only."""

    def __init__(self, seed: int) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        Plain.__init__(self, seed)
        self.accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def weights(self) -> dict[str, torch.Tensor]:
        return Fsdp2.weights(self)  # type: ignore[arg-type]

    def others(self, _folder: Path) -> list[str]:
        return KEYS  # as accelerate writes FSDP's


class Trained:
    """The Trainer, whose steps are its own: run once to the end, with a checkpoint in the middle."""

    def __init__(self, seed: int) -> None:
        self.model, self.losses = net(seed), []

    def run(self, folder: Path, resume: Path | None) -> None:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        class Model(nn.Module):
            def __init__(self, inner: Net) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
                logits = self.inner(tokens[:, :-1])
                return {"loss": loss_of(logits, tokens), "logits": logits}

        losses = self.losses

        class Note(TrainerCallback):
            def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **_more: Any) -> None:
                if "loss" in logs:
                    losses.append(logs["loss"])

        arguments = TrainingArguments(
            output_dir=str(folder), use_cpu=DEVICE == "cpu", max_steps=2 * STEPS, per_device_train_batch_size=4,
            report_to=[], save_strategy="steps", save_steps=STEPS, logging_steps=1, disable_tqdm=True,
            learning_rate=1e-2,
        )  # fmt: skip
        data = [{"tokens": row.cpu()} for number in range(8) for row in batch(number)]
        optimizers = (adam(self.model) if POLICIES[sys.argv[1]].fp8_param else None, None)
        trainer = Trainer(
            model=Model(self.model), args=arguments, train_dataset=data, callbacks=[Note()], optimizers=optimizers
        )
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)

    def weights(self) -> dict[str, torch.Tensor]:
        return {key: value.clone() for key, value in self.model.state_dict().items()}

    @staticmethod
    def others(folder: Path) -> list[str]:
        from safetensors.torch import load_file

        names = load_file(folder / f"checkpoint-{STEPS}" / "model.safetensors")
        return [name.removeprefix("inner.") for name in names]


class Fsdp2(Plain):
    """Sharded checkpoints of `torch.distributed.checkpoint`."""

    def __init__(self, seed: int) -> None:
        self.model = net(seed)
        self.shard()
        self.optimizer = adam(self.model)

    def shard(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "fp8": mpguard.fp8_state_dict(self.model)}

    def save(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        mpguard.load_fp8_state_dict(self.model, state["fp8"])

    def weights(self) -> dict[str, torch.Tensor]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))

    def others(self, folder: Path) -> list[str]:
        from torch.distributed.checkpoint import FileSystemReader

        names = FileSystemReader(folder).read_metadata().state_dict_metadata
        return [name.removeprefix("model.") for name in names if name.startswith("model.")]


class Fsdp1(Fsdp2):
    def shard(self) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel

        self.model = FullyShardedDataParallel(
            self.model,
            device_id=torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu"),
            use_orig_params=True,
        )


class Zero(Plain):
    """DeepSpeed's own checkpoints."""

    stage, partitioned = 1, False

    def __init__(self, seed: int) -> None:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": True},
            "gradient_clipping": 0.0,
        }
        torch.manual_seed(seed)
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=self.partitioned):
            model = Net()
        optimizer = adam(model)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.model = self.engine.module

    def step(self, number: int) -> float:
        tokens = batch(number)
        loss = loss_of(self.engine(tokens[:, :-1]), tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag="here")

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder), tag="here")

    def weights(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(each).clone() for name, each in self.model.named_parameters()}

    def others(self, folder: Path) -> list[str]:
        # DeepSpeed's own tool for weights cannot read what its BF16_Optimizer (stage 1) has written.
        return list(torch.load(folder / "here" / "mp_rank_00_model_states.pt", weights_only=False)["module"])


class Zero2(Zero):
    stage = 2

    def others(self, folder: Path) -> list[str]:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return list(get_fp32_state_dict_from_zero_checkpoint(str(folder), tag="here"))


class Zero3(Zero2):
    stage = 3


class Zero3Init(Zero3):
    """Built in parts: no rank ever has a whole weight."""

    partitioned = True


ENGINES: dict[str, Any] = {
    "plain": Plain, "early": Early, "forgetful": Forgetful, "safetensors": Safetensors, "ddp": Ddp,
    "accelerate": Accelerated, "accelerate-zero2": AcceleratedZero2, "accelerate-fsdp2": AcceleratedFsdp2,
    "trainer": Trained, "fsdp1": Fsdp1, "fsdp2": Fsdp2,
    "zero1": Zero, "zero2": Zero2, "zero3": Zero3, "zero3-init": Zero3Init,
}  # fmt: skip


def compared(name: str, folder: Path) -> dict[str, Any]:
    kind = ENGINES[name]
    first, again = kind(0), kind(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if kind is Trained:
            first.run(folder, None)
            again.run(folder / "again", folder / f"checkpoint-{STEPS}")
            start, straight, resumed = first.losses[:STEPS], first.losses[STEPS:], again.losses
        else:
            start = [first.step(number) for number in range(STEPS)]
            first.save(folder)
            if dist.is_initialized():
                dist.barrier()
            straight = [first.step(number) for number in range(STEPS, 2 * STEPS)]
            again.load(folder)
            resumed = [again.step(number) for number in range(STEPS, 2 * STEPS)]
    messages = [str(each.message) for each in caught if issubclass(each.category, mpguard.MpguardWarning)]
    ours, theirs = first.weights(), again.weights()
    fp8 = sum("Float8" in type(module).__name__ for module in again.model.modules())
    digest = hashlib.sha256(b"".join(ours[key].float().cpu().numpy().tobytes() for key in sorted(ours))).hexdigest()
    return {
        "engine": name, "start": start, "straight": straight, "resumed": resumed, "digest": digest,
        "equal": ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours),
        "keys": sorted(again.others(folder)) == KEYS, "fp8": fp8,
        "error": None, "messages": [text for text in messages if "history" in text],
    }  # fmt: skip


def main() -> None:
    policy, engines = sys.argv[1], sys.argv[2:]
    {"delayed": fake_delayed_scaling.install, "fake_te": fake_te_weights.install}.get(policy, lambda: None)()
    if DEVICE == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
    mpguard.activate(POLICIES[policy], enforce="off")
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl")
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name in engines:
        with tempfile.TemporaryDirectory() as own:
            where = [own]
            if dist.is_initialized():
                dist.broadcast_object_list(where)
            try:
                found = compared(name, Path(where[0]))
            except Exception:
                if dist.is_initialized() and dist.get_world_size() > 1:
                    raise  # the others would wait
                found = {"engine": name, "error": traceback.format_exc()}
            if dist.is_initialized():
                dist.barrier()
        sys.stdout.write(json.dumps({"rank": rank, **found}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
