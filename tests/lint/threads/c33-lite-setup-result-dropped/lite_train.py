import argparse
import os
import time

import torch
from pytorch_lightning.lite import LightningLite
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AlbertConfig, BertTokenizer, get_linear_schedule_with_warmup

from albert_pretrain import AlbertForMaskedSOP
from corpus import SegmentDataset


class Lite(LightningLite):
    def get_fps(self, cfg):
        return sorted(os.path.join(cfg.data_dir, f) for f in os.listdir(cfg.data_dir) if f.endswith(".json"))

    def get_data(self, cfg, i, fps, num_files):
        ds = SegmentDataset(fps[i * num_files:(i + 1) * num_files], BertTokenizer.from_pretrained(cfg.vocab))
        return DataLoader(ds, batch_size=cfg.batch_size, shuffle=True, num_workers=4, collate_fn=ds.collate)

    def run(self, model, optimizer, lr_scheduler, logger, num_files=20, global_step=0):
        self.setup(model, optimizer)
        while True:
            fps = self.get_fps(model.cfg)
            for i in range(len(fps) // num_files):
                train_loader = self.get_data(model.cfg, i, fps, num_files)
                train_loader = self.setup_dataloaders(train_loader)
                model.train()
                metric = {"loss": 0.0, "mlm_acc": 0.0, "sop_acc": 0.0, "log_step": 0.0}
                start_time = time.time()
                for j, batch in enumerate(tqdm(train_loader)):
                    outputs = model(**batch, output_hidden_states=True)
                    labels = batch["labels"]

                    loss = outputs.loss
                    optimizer.zero_grad()
                    self.backward(loss)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    lr_scheduler.step()

                    global_step += 1
                    mask = labels != -100
                    pred = outputs.prediction_logits.argmax(-1)
                    metric["loss"] += loss.item()
                    metric["mlm_acc"] += (pred[mask] == labels[mask]).float().mean().item()
                    metric["sop_acc"] += (outputs.sop_logits.argmax(-1) == batch["sentence_order_label"]).float().mean().item()
                    metric["log_step"] += 1
                    if global_step % 100 == 0:
                        n = metric.pop("log_step")
                        logger({k: v / n for k, v in metric.items()}, global_step, time.time() - start_time)
                        metric = {"loss": 0.0, "mlm_acc": 0.0, "sop_acc": 0.0, "log_step": 0.0}
                    if global_step >= model.cfg.max_steps:
                        self.save(model.state_dict(), os.path.join(model.cfg.out, "last.ckpt"))
                        return


def log(metrics, step, secs):
    print(step, {k: round(v, 4) for k, v in metrics.items()}, f"{secs:.1f}s",
          f"mem {torch.cuda.max_memory_allocated() / 2 ** 30:.1f}GB", flush=True)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--data_dir", default="data/segments")
    ap.add_argument("--vocab", default="bert-base-chinese")
    ap.add_argument("--out", default="out")
    ap.add_argument("--batch_size", type=int, default=64)
    ap.add_argument("--max_steps", type=int, default=500000)
    ap.add_argument("--devices", type=int, default=8)
    ap.add_argument("--num_nodes", type=int, default=2)
    ap.add_argument("--precision", default="bf16")
    cfg = ap.parse_args()
    model = AlbertForMaskedSOP(AlbertConfig(vocab_size=21128, hidden_size=1024, num_attention_heads=16,
                                            num_hidden_layers=24, intermediate_size=4096), cfg)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sched = get_linear_schedule_with_warmup(opt, 10000, cfg.max_steps)
    lite = Lite(accelerator="gpu", devices=cfg.devices, num_nodes=cfg.num_nodes, strategy="ddp",
                precision=cfg.precision)
    lite.run(model, opt, sched, log)
