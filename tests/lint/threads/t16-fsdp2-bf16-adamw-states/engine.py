import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup


class FSDPEngine:
    def __init__(self, config):
        self.config = config
        self.dtype = getattr(torch, config["dtype"])
        self.device = torch.device("cuda", torch.cuda.current_device())

    def create_model(self):
        model = AutoModelForCausalLM.from_pretrained(self.config["path"], dtype=self.dtype,
                                                     attn_implementation="flash_attention_2")
        if self.config["gradient_checkpointing"]:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.config.use_cache = False
        self.model = model

    def parallelize(self):
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=True)
        kwargs = dict(mp_policy=policy, reshard_after_forward=self.config["fsdp"]["reshard_after_forward"])
        for layer in self.model.model.layers:
            fully_shard(layer, **kwargs)
        fully_shard(self.model, **kwargs)
        self.model.to(self.device)

    def create_optimizer(self, total_steps):
        cfg = self.config["optimizer"]
        assert cfg["type"] in ("adam", "sgd"), cfg["type"]
        if cfg["type"] == "adam":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg["lr"], weight_decay=cfg["weight_decay"],
                                               betas=(cfg["beta1"], cfg["beta2"]), eps=cfg["eps"], fused=True)
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=cfg["lr"])
        self.scheduler = get_cosine_schedule_with_warmup(self.optimizer, int(cfg["warmup_ratio"] * total_steps), total_steps)

    def forward_backward(self, batch, scale):
        batch = {k: v.to(self.device) for k, v in batch.items()}
        loss = self.model(**batch).loss
        (loss * scale).backward()
        return loss.detach()

    def step(self):
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config["optimizer"]["gradient_clipping"])
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def save(self, path):
        sd = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(sd, path)
