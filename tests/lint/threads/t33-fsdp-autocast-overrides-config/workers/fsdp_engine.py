import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import AutoModelForCausalLM

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class BaseEngine:
    def __init__(self, model_config, engine_config, optim_config):
        self.model_config = model_config
        self.engine_config = engine_config
        self.optim_config = optim_config
        self.device_name = "cuda"
        self.rank = torch.distributed.get_rank()

    def initialize(self):
        module = AutoModelForCausalLM.from_pretrained(self.model_config["path"], dtype=torch.float32)
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.module = self._build_fsdp_module(module)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=self.optim_config["lr"],
                                           weight_decay=self.optim_config["weight_decay"])

    def _build_fsdp_module(self, module):
        cfg = self.engine_config.get("mixed_precision")
        if cfg is not None:
            param_dtype = PRECISIONS[cfg.get("param_dtype", "bf16")]
            reduce_dtype = PRECISIONS[cfg.get("reduce_dtype", "fp32")]
            buffer_dtype = PRECISIONS[cfg.get("buffer_dtype", "fp32")]
        else:
            param_dtype, reduce_dtype, buffer_dtype = torch.bfloat16, torch.float32, torch.float32
        mixed_precision = MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype, buffer_dtype=buffer_dtype)
        layers = {type(m) for m in module.modules() if type(m).__name__ == self.engine_config["wrap_policy"]}

        def policy(module, recurse, nonwrapped_numel):
            return transformer_auto_wrap_policy(module, recurse, nonwrapped_numel, transformer_layer_cls=layers)

        return FSDP(module, auto_wrap_policy=policy, mixed_precision=mixed_precision, use_orig_params=False,
                    device_id=torch.cuda.current_device(), sync_module_states=True)

    def forward_backward_batch(self, micro_batches, loss_function):
        self.module.train()
        losses = []
        for mb in micro_batches:
            loss = self.forward_step(mb, loss_function) / len(micro_batches)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def forward_step(self, micro_batch, loss_function):
        raise NotImplementedError

    def optimizer_step(self):
        grad_norm = self.module.clip_grad_norm_(max_norm=self.optim_config["clip_grad"])
        if not torch.isfinite(grad_norm):
            print(f"WARN: grad_norm is not finite: {grad_norm}")
            self.optimizer.zero_grad()
        else:
            self.optimizer.step()
        return grad_norm.item()

    def save_checkpoint(self, path):
        with FSDP.state_dict_type(self.module, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)):
            sd = self.module.state_dict()
        if self.rank == 0:
            torch.save(sd, path)


class FSDPEngineWithLMHead(BaseEngine):
    def prepare_model_inputs(self, micro_batch):
        return {k: v.to(self.device_name) for k, v in micro_batch.items() if k in ("input_ids", "attention_mask", "position_ids")}

    def forward_step(self, micro_batch, loss_function):
        inputs = self.prepare_model_inputs(micro_batch)
        with torch.autocast(device_type=self.device_name, dtype=torch.bfloat16):
            output = self.module(**inputs, use_cache=False)
            loss = loss_function(output.logits, micro_batch["input_ids"].to(self.device_name),
                                 micro_batch["loss_mask"].to(self.device_name))
        return loss
