import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def activation_stream(model_name, texts, layer, batch_size, device="cuda"):
    tok = AutoTokenizer.from_pretrained(model_name)
    lm = AutoModelForCausalLM.from_pretrained(model_name).to(device).eval()
    buf = []
    while True:
        for t in texts:
            ids = tok(t, return_tensors="pt", truncation=True, max_length=512).input_ids.to(device)
            with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
                h = lm(ids, output_hidden_states=True).hidden_states[layer][0]
            buf.append(h.float())
            if sum(map(len, buf)) >= batch_size:
                x = torch.cat(buf)
                yield x[:batch_size]
                buf = [x[batch_size:]]
