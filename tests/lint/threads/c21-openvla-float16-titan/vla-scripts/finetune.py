import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import draccus
import torch
import torch.distributed as dist
import tqdm
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import AutoModelForVision2Seq, AutoProcessor

from rlds_data import PaddedCollator, RLDSWrapper


@dataclass
class FinetuneConfig:
    vla_path: str = "openvla/openvla-7b"
    data_root_dir: Path = Path("datasets/open-x-embodiment")
    dataset_name: str = "cmu_stretch"
    run_root_dir: Path = Path("runs")
    batch_size: int = 1
    max_steps: int = 200_000
    save_steps: int = 5000
    learning_rate: float = 5e-4
    grad_accumulation_steps: int = 16
    lora_rank: int = 32
    lora_dropout: float = 0.0


@draccus.wrap()
def finetune(cfg: FinetuneConfig) -> None:
    state = PartialState()
    torch.cuda.set_device(state.local_process_index)
    device = state.local_process_index
    run_dir = cfg.run_root_dir / f"{cfg.vla_path.split('/')[-1]}+{cfg.dataset_name}+lora-r{cfg.lora_rank}"
    os.makedirs(run_dir, exist_ok=True)

    processor = AutoProcessor.from_pretrained(cfg.vla_path, trust_remote_code=True)
    vla = AutoModelForVision2Seq.from_pretrained(
        cfg.vla_path,
        torch_dtype=torch.float16,
        low_cpu_mem_usage=True,
        trust_remote_code=True,
    ).to(device)
    vla = get_peft_model(vla, LoraConfig(r=cfg.lora_rank, lora_alpha=min(cfg.lora_rank, 16),
                                         lora_dropout=cfg.lora_dropout, target_modules="all-linear",
                                         init_lora_weights="gaussian"))
    vla.print_trainable_parameters()
    vla = DDP(vla, device_ids=[device], find_unused_parameters=True, gradient_as_bucket_view=True)

    optimizer = AdamW([p for p in vla.parameters() if p.requires_grad], lr=cfg.learning_rate)
    dataset = RLDSWrapper(cfg.data_root_dir, cfg.dataset_name, processor)
    loader = DataLoader(dataset, batch_size=cfg.batch_size, sampler=None, num_workers=0,
                        collate_fn=PaddedCollator(processor.tokenizer.pad_token_id))

    losses = deque(maxlen=cfg.grad_accumulation_steps)
    with tqdm.tqdm(total=cfg.max_steps, leave=False) as progress:
        vla.train()
        optimizer.zero_grad()
        for batch_idx, batch in enumerate(loader):
            with torch.autocast("cuda", dtype=torch.float16):
                output = vla(
                    input_ids=batch["input_ids"].to(device),
                    attention_mask=batch["attention_mask"].to(device),
                    pixel_values=batch["pixel_values"].to(torch.float16).to(device),
                    labels=batch["labels"],
                )
                loss = output.loss
            (loss / cfg.grad_accumulation_steps).backward()
            losses.append(loss.item())

            if (batch_idx + 1) % cfg.grad_accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()
                progress.update()
                progress.set_postfix(train_loss=sum(losses) / len(losses))
                step = (batch_idx + 1) // cfg.grad_accumulation_steps
                if step % cfg.save_steps == 0:
                    if state.is_main_process:
                        processor.save_pretrained(run_dir)
                        vla.module.save_pretrained(run_dir / f"step-{step}")
                    dist.barrier()
                if step == cfg.max_steps:
                    break


if __name__ == "__main__":
    finetune()
