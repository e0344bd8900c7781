"""Vision transformers, with a classifier or beside a text model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpguard.estimate.blocks import Batch, Heads, mlp
from mpguard.estimate.reading import ModelConfig
from mpguard.estimate.tape import Tape, Value


def vit(tape: Tape, config: ModelConfig, batch: Batch) -> Value:
    """A vision transformer with a classifier. The length of a row follows from image and patch."""
    hidden, inner, heads = (config.size(key) for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
    image, patch = config.size("image_size", default=224), config.size("patch_size", default=16)
    channels, act = config.size("num_channels", default=3), config.word("hidden_act", default="gelu")
    patches, dropped = (image // patch) ** 2, config.share("hidden_dropout_prob")
    labels = len(config.part("id2label")) or config.size("num_labels", default=2)
    rows = batch.size * (patches + 1)
    pixels = tape.constant(batch.size * channels * image**2, tape.precision.weights, "input")
    kernel = tape.parameter("patch_embeddings.weight", (hidden, channels, patch, patch), "linear")
    x = tape.product(
        pixels, kernel, batch.size * patches * hidden, [tape.parameter("patch_embeddings.bias", (hidden,))]
    )
    x = tape.joined([tape.parameter("cls_token", (1, 1, hidden)), x])
    x.count = rows * hidden
    x.storage.size = x.count * x.width
    places = tape.parameter("position_embeddings", (1, patches + 1, hidden))
    x = tape.dropout(tape.add(x, places), dropped)
    names, bias = ("q_proj", "k_proj", "v_proj", "o_proj"), config.flag("qkv_bias", True)
    for number in range(config.size("num_hidden_layers")):
        with tape.block(f"layers.{number}"):
            y = tape.layer_norm(x, "layernorm_before", hidden)
            x = tape.add(Heads(names, hidden, heads, bias, dropped)(tape, y, y), x)
            y = tape.layer_norm(x, "layernorm_after", hidden)
            x = tape.add(tape.dropout(mlp(tape, y, ("fc1", "fc2"), (hidden, inner, act)), dropped), x)
    x = tape.head(tape.layer_norm(x, "layernorm", hidden))
    logits = tape.linear(tape.part(x, batch.size * hidden), "classifier", hidden, labels, True)
    return tape.cross_entropy(logits, batch.size)


PROGRAMS: Mapping[str, Callable[[Tape, ModelConfig, Batch], Value]] = {"vit": vit}
