import torch
from torch import nn


class FourierFFTLayer(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, hidden_states):
        return torch.fft.fft(torch.fft.fft(hidden_states, dim=-1), dim=-2).real


class FNetLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        h = config["hidden_size"]
        self.fft = FourierFFTLayer()
        self.mixing_layer_norm = nn.LayerNorm(h)
        self.feed_forward = nn.Linear(h, config["intermediate_size"])
        self.output_dense = nn.Linear(config["intermediate_size"], h)
        self.output_layer_norm = nn.LayerNorm(h)
        self.dropout = nn.Dropout(config["dropout_rate"])
        self.activation = nn.GELU()

    def forward(self, hidden_states):
        fft_output = self.fft(hidden_states)
        fft_output = self.mixing_layer_norm(fft_output + hidden_states)
        inter = self.activation(self.feed_forward(fft_output))
        return self.output_layer_norm(self.dropout(self.output_dense(inter)) + fft_output)


class FNetEmbeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word = nn.Embedding(config["vocab_size"], config["embedding_size"], padding_idx=config["pad_token_id"])
        self.position = nn.Embedding(config["max_position_embeddings"], config["embedding_size"])
        self.token_type = nn.Embedding(config["type_vocab_size"], config["embedding_size"])
        self.norm = nn.LayerNorm(config["embedding_size"])
        self.hidden_mapping = nn.Linear(config["embedding_size"], config["hidden_size"])
        self.dropout = nn.Dropout(config["dropout_rate"])

    def forward(self, input_ids, type_ids):
        pos = torch.arange(input_ids.size(1), device=input_ids.device)
        e = self.word(input_ids) + self.position(pos) + self.token_type(type_ids)
        return self.dropout(self.hidden_mapping(self.norm(e)))


class FNetForPreTraining(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embedder = FNetEmbeddings(config)
        self.layers = nn.ModuleList(FNetLayer(config) for _ in range(config["num_hidden_layers"]))
        h = config["hidden_size"]
        self.mlm = nn.Sequential(nn.Linear(h, config["embedding_size"]), nn.GELU(),
                                 nn.LayerNorm(config["embedding_size"]), nn.Linear(config["embedding_size"], config["vocab_size"]))

    def forward(self, input_ids, type_ids):
        x = self.embedder(input_ids, type_ids)
        for layer in self.layers:
            x = layer(x)
        return self.mlm(x)
