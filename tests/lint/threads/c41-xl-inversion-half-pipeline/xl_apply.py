import torch
from diffusers import DiffusionPipeline

from xl_inversion import base_model_path, init_word, train_embedding

base = DiffusionPipeline.from_pretrained(base_model_path, torch_dtype=torch.float16, variant="fp16",
                                         use_safetensors=True, add_watermarker=False)
torch.set_grad_enabled(False)
_ = base.to("cuda:1")
state = torch.load(f"learned_embeddings/{train_embedding}_800.pt")
for tok, enc, key in ((base.tokenizer, base.text_encoder, "te1"), (base.tokenizer_2, base.text_encoder_2, "te2")):
    tok.add_tokens(train_embedding)
    enc.resize_token_embeddings(len(tok))
    enc.get_input_embeddings().weight[tok.convert_tokens_to_ids(train_embedding)] = state[key].to(enc.device, enc.dtype)
base(f"a photo of {train_embedding} on a beach", num_inference_steps=40).images[0].save("out.png")
