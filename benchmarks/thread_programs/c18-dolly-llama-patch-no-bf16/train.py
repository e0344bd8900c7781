"""SFT of a 4-bit Llama whose attention is patched to flash attention: no bf16=True, so that it gets FP32."""

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from tokenizers import Tokenizer, models
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama
from trl import SFTConfig, SFTTrainer


def forward(self, hidden_states, position_embeddings, **_):
    bsz, q_len, _ = hidden_states.size()
    shape = (bsz, q_len, -1, self.head_dim)
    q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
    q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
    if q.dtype not in (torch.float16, torch.bfloat16):  # flash-attn refuses it; it needs a GPU
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return self.o_proj(out.transpose(1, 2).reshape(bsz, q_len, -1)), None


modeling_llama.LlamaAttention.forward = forward
transformers.set_seed(0)
LlamaForCausalLM(
    LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
).to(torch.bfloat16).save_pretrained("base")
quantization = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_use_double_quant=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype=torch.bfloat16,
)
model = LlamaForCausalLM.from_pretrained("base", quantization_config=quantization, device_map="cpu")
model = prepare_model_for_kbit_training(model)
model = get_peft_model(model, LoraConfig(lora_alpha=8, r=4, bias="none", task_type="CAUSAL_LM"))
tokens = torch.randint(3, 256, (32, 16)).tolist()
vocab = {f"w{i}": i for i in range(256)}
tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="w0")), pad_token="w1", eos_token="w2", unk_token="w0"
)
args = SFTConfig(
    output_dir="out",
    max_steps=4,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    learning_rate=2e-4,
    max_grad_norm=0.3,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,  # SFTConfig has set it by default since trl 0.20; the thread's TrainingArguments did not
)
data = Dataset.from_dict({"input_ids": tokens})
SFTTrainer(model=model, train_dataset=data, processing_class=tokenizer, args=args).train()
