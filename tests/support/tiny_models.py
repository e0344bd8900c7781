"""One tiny model per architecture that `mpguard estimate` knows, as transformers builds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from mpguard.estimate import ModelConfig

_DECODER: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: Mapping[str, Any] = {**_DECODER, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_SHARED: Mapping[str, Any] = {
    **_DECODER, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_shared_experts": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_ENCODER: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 512,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 256,
}  # fmt: skip

_SEQ2SEQ: Mapping[str, Any] = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256, "decoder_ffn_dim": 128, "vocab_size": 512, "dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "max_position_embeddings": 256,
    "use_cache": False, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip

_T5: Mapping[str, Any] = {
    "d_model": 64, "d_ff": 256, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 512,
    "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu", "use_cache": False, "decoder_start_token_id": 0,
}  # fmt: skip

#: An image has 64 patches.
_TOWER: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 64,
    "patch_size": 8,
}  # fmt: skip
_TEXT: Mapping[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 64, "projection_size": 64,
}  # fmt: skip
_MROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

#: Dropout is off: on the CPU it saves other masks than on a GPU.
TINY: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "smollm3", "granite", "olmo2", "phi3", "stablelm"), _DECODER),
    "starcoder2": _DECODER,
    **{
        name: {**_DECODER, "head_dim": 32}
        for name in ("qwen3", "gemma", "gemma2", "gemma3_text", "ministral3", "ernie4_5", "glm", "glm4")
    },
    "seed_oss": {**_DECODER, "head_dim": 32, "attention_dropout": 0.0, "residual_dropout": 0.0},
    **{name: {**_DECODER, "num_hidden_layers": 4} for name in ("olmo3", "cohere", "cohere2")},
    "phi": {**_DECODER, "num_key_value_heads": 4},
    "mixtral": {**_DECODER, "num_local_experts": 4},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 96, "mlp_only_layers": [1]},
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True, "head_dim": 32},
    "olmoe": {name: value for name, value in _EXPERTS.items() if name != "moe_intermediate_size"},
    "deepseek_v3": {
        **_SHARED, "num_key_value_heads": 4, "n_group": 2, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32,
    },
    "glm4_moe": {**_SHARED, "n_group": 1, "head_dim": 32},
    "gpt_oss": {**_DECODER, "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32},
    "gpt2": {
        "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 512, "n_positions": 256, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False,
    },
    "gpt_neox": {
        "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "vocab_size": 512, "use_cache": False,
    },
    "opt": {
        "hidden_size": 64, "ffn_dim": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 512,
        "max_position_embeddings": 256, "dropout": 0.0, "word_embed_proj_dim": 32, "use_cache": False,
    },
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "mpnet"), _ENCODER),
    "electra": {**_ENCODER, "embedding_size": 32},
    "deberta-v2": {
        **_ENCODER, "relative_attention": True, "position_buckets": 16, "norm_rel_ebd": "layer_norm",
        "share_att_key": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0,
    },
    "distilbert": {
        "dim": 64, "hidden_dim": 256, "n_layers": 3, "n_heads": 4, "vocab_size": 512, "dropout": 0.0,
        "attention_dropout": 0.0, "max_position_embeddings": 256,
    },
    "clip": {"vision_config": _TOWER, "text_config": _TEXT, "projection_dim": 32},
    "siglip": {"vision_config": _TOWER, "text_config": _TEXT},
    "llava": {
        "vision_config": {**_TOWER, "patch_size": 16, "model_type": "clip_vision_model"},
        "text_config": {**_DECODER, "model_type": "llama"}, "image_token_index": 7, "vision_feature_layer": -1,
    },
    "paligemma": {
        "vision_config": {
            **_TOWER, "patch_size": 16, "model_type": "siglip_vision_model", "vision_use_head": False,
        },
        "text_config": {**_DECODER, "model_type": "gemma", "head_dim": 32}, "image_token_index": 7,
        "projection_dim": 64,
    },
    "gemma3": {
        "vision_config": {**_TOWER, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 16,
        "text_config": {**_DECODER, "model_type": "gemma3_text", "head_dim": 32}, "image_token_index": 7,
    },
    "mistral3": {
        "vision_config": {**_TOWER, "model_type": "pixtral", "image_size": 64, "head_dim": 16},
        "text_config": {**_DECODER, "model_type": "mistral"}, "image_token_index": 7, "vision_feature_layer": -1,
    },
    "qwen2_vl": {
        "vision_config": {"depth": 3, "embed_dim": 64, "num_heads": 4, "hidden_size": 64}, "image_token_id": 7,
        "text_config": {**_DECODER, "rope_parameters": _MROPE},
    },
    "qwen2_5_vl": {
        "vision_config": {
            "depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 64,
            "fullatt_block_indexes": [2],
        },
        "image_token_id": 7, "text_config": {**_DECODER, "rope_parameters": _MROPE},
    },
    "vit": {
        "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "image_size": 64, "patch_size": 8,
    },
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian", "m2m_100"), _SEQ2SEQ),
    "whisper": {**_SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 48, "max_target_positions": 64},
    **dict.fromkeys(("t5", "mt5"), _T5),
}  # fmt: skip


#: The class that builds a model, and the families that it builds; others are decoders.
_HEADS = {
    "AutoModelForMaskedLM": (
        "bert", "roberta", "xlm-roberta", "camembert", "mpnet", "electra", "deberta-v2", "distilbert",
    ),
    "AutoModelForImageClassification": ("vit",),
    "AutoModel": ("clip", "siglip"),
    "AutoModelForImageTextToText": ("llava", "paligemma", "gemma3", "mistral3", "qwen2_vl", "qwen2_5_vl"),
    "AutoModelForSeq2SeqLM": ("bart", "mbart", "pegasus", "marian", "m2m_100", "t5", "mt5"),
    "AutoModelForSpeechSeq2Seq": ("whisper",),
}  # fmt: skip


#: Tokens that are replaced by an image.
IMAGE_TOKENS = dict.fromkeys(("llava", "paligemma", "gemma3", "mistral3", "qwen2_vl", "qwen2_5_vl"), 16)


def tiny(name: str, **changes: Any) -> tuple[Any, ModelConfig]:
    """Return a model in training mode, and its config as `config.json` has it."""
    import transformers

    config = transformers.CONFIG_MAPPING[name](**{**TINY[name], **changes})
    model = getattr(transformers, _head_of(name)).from_config(config)
    return model.train(), ModelConfig(json.loads(config.to_json_string(use_diff=False)), name)


def default(name: str) -> tuple[Any, ModelConfig]:
    """Return a model of two blocks with the default sizes of its class, without memory, and its config."""
    import transformers

    config = transformers.CONFIG_MAPPING[name]()
    for key in ("num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_layers"):
        for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
            if getattr(part, key, None):
                setattr(part, key, 2)
                if getattr(part, "layer_types", None):
                    part.layer_types = part.layer_types[:2]
    with torch.device("meta"):
        model = getattr(transformers, _head_of(name)).from_config(config)
    return model, ModelConfig(json.loads(config.to_json_string(use_diff=False)), name)


def part_config(kind: str) -> Any:
    """Return the config of a part of a model, with its defaults."""
    import transformers
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig, Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig, Qwen2VLVisionConfig

    nested = {
        "qwen2_vl": Qwen2VLVisionConfig, "qwen2_vl_text": Qwen2VLTextConfig, "qwen2_5_vl": Qwen2_5_VLVisionConfig,
        "qwen2_5_vl_text": Qwen2_5_VLTextConfig,
    }  # fmt: skip
    return (nested.get(kind) or transformers.CONFIG_MAPPING[kind])()


def _head_of(name: str) -> str:
    return next((head for head, names in _HEADS.items() if name in names), "AutoModelForCausalLM")


def inputs(name: str, dtype: torch.dtype, rows: int, length: int) -> dict[str, torch.Tensor]:
    """Return a batch for a tiny model."""
    if name == "vit":
        return {
            "pixel_values": torch.randn(rows, 3, 64, 64, dtype=dtype),
            "labels": torch.zeros(rows, dtype=torch.long),
        }
    ids = torch.randint(8, 500, (rows, length))
    pixels = torch.randn(rows, 3, 64, 64, dtype=dtype)
    if name in ("clip", "siglip"):
        return {"input_ids": ids, "pixel_values": pixels, "return_loss": torch.tensor(True)}
    if tokens := IMAGE_TOKENS.get(name):
        ids[:, :tokens] = 7
        batch = {"input_ids": ids, "labels": ids.clone(), "pixel_values": pixels}
        if name in ("gemma3", "paligemma"):
            batch["token_type_ids"] = (ids == 7).long()
        if name == "mistral3":
            batch["image_sizes"] = torch.tensor([[64, 64]] * rows)
        if name.startswith("qwen"):
            batch["pixel_values"] = torch.randn(rows * 64, 3 * 2 * 14 * 14, dtype=dtype)
            batch["image_grid_thw"] = torch.tensor([[1, 8, 8]] * rows)
            batch["mm_token_type_ids"] = (ids == 7).long()
        return batch
    if name == "whisper":
        return {"input_features": torch.randn(rows, 16, 96, dtype=dtype), "labels": ids}
    return {"input_ids": ids, "labels": ids.clone()}
