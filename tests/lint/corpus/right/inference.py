"""Half precision where nothing is trained: good practice."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline


def generate(prompt):
    tokenizer = AutoTokenizer.from_pretrained("gpt2")
    model = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.float16).eval().cuda()
    inputs = tokenizer(prompt, return_tensors="pt").to("cuda")
    with torch.inference_mode():
        return tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0])


def classify(images, model):
    model = model.half().eval().cuda()
    with torch.no_grad():
        return [model(image.half().cuda()).argmax(-1) for image in images]


def piped(text):
    return pipeline("summarization", torch_dtype=torch.bfloat16, device=0)(text)
