import torch
from transformers import GenerationConfig, TrainerCallback


class SampleCallback(TrainerCallback):
    def __init__(self, tokenizer, prompts, max_new_tokens=128):
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.config = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )

    @torch.no_grad()
    def on_evaluate(self, args, state, control, model=None, **kwargs):
        model.eval()
        model.config.use_cache = True
        for prompt in self.prompts:
            text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
            enc = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).to(model.device)
            out = model.generate(**enc, generation_config=self.config)
            answer = self.tokenizer.decode(out[0, enc.input_ids.shape[1]:], skip_special_tokens=True)
            print(f"[step {state.global_step}] {prompt}\n{answer}\n")
        model.config.use_cache = False
        model.train()
