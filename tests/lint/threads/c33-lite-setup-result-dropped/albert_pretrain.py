import torch.nn as nn
from transformers import AlbertForPreTraining


class AlbertForMaskedSOP(nn.Module):
    def __init__(self, config, cfg):
        super().__init__()
        self.net = AlbertForPreTraining(config)
        self.cfg = cfg

    def forward(self, input_ids, attention_mask, token_type_ids, labels, sentence_order_label,
                output_hidden_states=False):
        return self.net(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids,
                        labels=labels, sentence_order_label=sentence_order_label,
                        output_hidden_states=output_hidden_states)
