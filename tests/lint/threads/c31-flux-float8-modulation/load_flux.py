import torch
from diffusers import FluxKontextPipeline
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import float8_dynamic_activation_float8_weight, quantize_


def LoadPipeline(path, dtype=torch.bfloat16):
    pipeline = FluxKontextPipeline.from_pretrained(path, local_files_only=True, torch_dtype=dtype)
    pipeline.to("cuda")

    quantize_(pipeline.vae, float8_dynamic_activation_float8_weight())
    quantize_(pipeline.text_encoder, float8_dynamic_activation_float8_weight())
    quantize_(pipeline.text_encoder_2, float8_dynamic_activation_float8_weight())

    pipeline.vae = torch.compile(pipeline.vae, mode="max-autotune", fullgraph=True)
    pipeline.text_encoder = torch.compile(pipeline.text_encoder, mode="max-autotune", fullgraph=True)
    pipeline.text_encoder_2 = torch.compile(pipeline.text_encoder_2, mode="max-autotune", fullgraph=True)

    config = Float8LinearConfig.from_recipe_name("tensorwise")

    def module_filter_fn(mod, fqn):
        if isinstance(mod, torch.nn.Linear):
            if mod.in_features % 16 != 0 or mod.out_features % 16 != 0:
                return False
        return True

    convert_to_float8_training(pipeline.transformer, config=config, module_filter_fn=module_filter_fn)
    pipeline.transformer.enable_gradient_checkpointing()
    pipeline.transformer = torch.compile(pipeline.transformer)
    return pipeline
