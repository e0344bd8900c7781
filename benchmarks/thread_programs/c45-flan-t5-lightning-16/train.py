"""Lightning with 16-mixed and a T5 that was pretrained in bf16: its activations overflow in FP16."""

import lightning as L
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from transformers import T5Config, T5ForConditionalGeneration


class T5FineTuner(L.LightningModule):
    def __init__(self, model_name="flan-t5", lr=1e-4):
        super().__init__()
        self.lr = lr
        self.model = T5ForConditionalGeneration.from_pretrained(model_name)

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=self.lr)


L.seed_everything(0)
config = T5Config(
    vocab_size=256, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
)
pretrained = T5ForConditionalGeneration(config)
with torch.no_grad():  # the large T5 models have such activations: above 65504 after a feed-forward layer
    pretrained.encoder.block[1].layer[1].DenseReluDense.wo.weight *= 1e7
pretrained.save_pretrained("flan-t5")
# Lightning takes "16-mixed" on a GPU only; its plugin runs on a CPU too.
precision = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu"))
trainer = L.Trainer(
    accelerator="cpu",
    devices=1,
    plugins=[precision],
    max_steps=8,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(T5FineTuner(), torch.utils.data.DataLoader(torch.randint(1, 256, (64, 16)), batch_size=8))
