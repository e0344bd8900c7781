import torch
import transformers
from einops import rearrange
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_value=None,
            output_attentions=False, use_cache=False):
    bsz, q_len, _ = hidden_states.size()
    q = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
    k = self.k_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
    v = self.v_proj(hidden_states).view(bsz, q_len, self.num_key_value_heads, self.head_dim).transpose(1, 2)
    cos, sin = self.rotary_emb(v, seq_len=q_len)
    q, k = apply_rotary_pos_emb(q, k, cos, sin, position_ids)

    qkv = torch.stack([q, k, v], dim=2)
    qkv = qkv.transpose(1, 3)
    key_padding_mask = attention_mask
    nheads = qkv.shape[-2]
    x = rearrange(qkv, "b s three h d -> b s (three h d)")
    x_unpad, indices, cu_q_lens, max_s = unpad_input(x, key_padding_mask)
    x_unpad = rearrange(x_unpad, "nnz (three h d) -> nnz three h d", three=3, h=nheads)
    out = flash_attn_varlen_qkvpacked_func(x_unpad, cu_q_lens, max_s, 0.0, softmax_scale=None, causal=True)
    out = rearrange(pad_input(rearrange(out, "nnz h d -> nnz (h d)"), indices, bsz, q_len),
                    "b s (h d) -> b s h d", h=nheads)
    return self.o_proj(rearrange(out, "b s h d -> b s (h d)")), None, past_key_value


def _prepare_decoder_attention_mask(self, attention_mask, input_shape, inputs_embeds, past_key_values_length):
    return attention_mask


def replace_attn_with_flash_attn():
    llama = transformers.models.llama.modeling_llama
    llama.LlamaModel._prepare_decoder_attention_mask = _prepare_decoder_attention_mask
    llama.LlamaAttention.forward = forward
