"""Vision transformers: with a classifier, next to an encoder of text (CLIP), or in front of a decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

from mpguard.core.errors import ConfigError
from mpguard.estimate import layers
from mpguard.estimate.blocks import Batch, Heads, mlp, token_ids
from mpguard.estimate.decoders import STYLES, Decoder, DecoderStyle
from mpguard.estimate.reading import ModelConfig
from mpguard.estimate.tape import FULL, INDEX, Tape, Value


@dataclasses.dataclass(frozen=True)
class TowerStyle:
    """How a family of vision towers differs from CLIP's.

    class_token: a further row stands for the image. bias: of the patches' matmul. table: there is a table of
    positions; else they are rotary, and images have any size. first_norm, last_norm: on what blocks get, and on what
    they return. pooled: a head with attention pools the rows. rms: norms have no mean. gated: the MLP has a gate.
    fused: queries, keys and values are one matmul. frames: images of which a patch is made. keys: the names of sizes.
    """

    class_token: bool = False
    bias: bool = False
    table: bool = True
    first_norm: bool = False
    last_norm: bool = False
    pooled: bool = False
    rms: bool = False
    gated: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    fused: bool = False
    frames: int = 1
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def key(self, name: str) -> str:
        """Return the name of a size in the config."""
        return self.keys.get(name, name)


_QWEN = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth", "num_channels": "in_channels"}

TOWERS: dict[str, TowerStyle] = {
    "clip_vision_model": TowerStyle(class_token=True, first_norm=True, last_norm=True),
    "siglip_vision_model": TowerStyle(bias=True, last_norm=True, pooled=True),
    "pixtral": TowerStyle(table=False, first_norm=True, rms=True, gated=True, attention_bias=False, mlp_bias=False),
    "qwen2_vl": TowerStyle(table=False, fused=True, frames=2, keys={**_QWEN, "hidden_size": "embed_dim"}),
    "qwen2_5_vl": TowerStyle(table=False, fused=True, frames=2, rms=True, gated=True, keys=_QWEN),
}


class Tower:
    """A vision tower with one image for each row."""

    def __init__(self, tape: Tape, config: ModelConfig, batch: Batch) -> None:
        style = TOWERS.get(config.architecture)
        if style is None:
            raise ConfigError(
                f"{config.path}: the vision tower `{config.architecture}` is not known; known are "
                f"{', '.join(sorted(TOWERS))}"
            )
        self.tape, self.config, self.style = tape, config, style
        self.hidden, self.heads = self._size("hidden_size"), self._size("num_attention_heads")
        self.inner = (
            config.size("intermediate_size") if config.has("intermediate_size")
            else int(self.hidden * config.share("mlp_ratio", default=4.0))
        )  # fmt: skip
        self.act = config.word("hidden_act", default="gelu")
        self.patch = config.size("patch_size", "spatial_patch_size")
        self.patches = (config.size("image_size") // self.patch) ** 2 if self.style.table else batch.patches
        self.images = batch.size
        self.rows = batch.size * (self.patches + self.style.class_token)

    def _size(self, name: str) -> int:
        return self.config.size(self.style.key(name))

    def run(self, used: int | None = None) -> Value:
        """Run it, and return a row for each patch. used: how many of its blocks give them; others only run."""
        tape, style, hidden = self.tape, self.style, self.hidden
        x = self._embedded()
        turns = [tape.constant(self.rows * (hidden // self.heads), FULL) for _ in range(2)]
        if not style.fused:  # all images are one row, and a mask keeps them apart
            turns.append(tape.constant(self.rows**2, x.width))
        for number in range(self.config.blocks(style.key("num_hidden_layers"))):
            with tape.block(f"vision.layers.{number}"):
                y = self._block(x, [] if style.table else turns)
            x = y if used is None or number < used else x
        if style.last_norm:
            with tape.unused(used is not None or style.class_token):
                y = tape.layer_norm(x, "vision.post_layernorm", hidden)
            x = x if used is not None or style.class_token else y
        return x

    def pooled(self, x: Value) -> Value:
        """Return one row for each image."""
        tape, hidden = self.tape, self.hidden
        if not self.style.pooled:
            return tape.layer_norm(tape.part(x, self.images * hidden), "vision.post_layernorm", hidden)
        probe = tape.repeated(tape.parameter("vision.head.probe", (1, 1, hidden)), self.images)
        weight = tape.parameter("vision.head.attention.in_proj", (3 * hidden, hidden), "linear")
        bias = tape.parameter("vision.head.attention.in_proj_bias", (3 * hidden,))
        q = tape.product(probe, weight, self.images * hidden, [bias])
        both = tape.copy(tape.product(x, weight, 2 * x.count, [bias]))
        k, v = (tape.part(both, x.count) for _ in range(2))
        y = tape.attention(q, k, v, self.heads * self.images)
        y = tape.linear(y, "vision.head.attention.out_proj", hidden, hidden, True)
        z = mlp(tape, tape.layer_norm(y, "vision.head.layernorm", hidden), ("vision.head.fc1", "vision.head.fc2"),
                (hidden, self.inner, self.act))  # fmt: skip
        return tape.add(y, z)

    def _norm(self, x: Value, name: str) -> Value:
        if self.style.rms:
            return layers.rms_norm(self.tape, x, name, self.hidden)
        return self.tape.layer_norm(x, name, self.hidden)

    def _embedded(self) -> Value:
        tape, style, hidden, patch = self.tape, self.style, self.hidden, self.patch
        channels = self.config.size(style.key("num_channels"), "in_chans", default=3)
        shape = (hidden, channels, *([style.frames] if style.frames > 1 else []), patch, patch)
        count = self.images * self.patches
        pixels = tape.constant(count * channels * style.frames * patch**2, tape.precision.weights, "input")
        kernel = tape.parameter("vision.patch_embedding.weight", shape, "linear")
        bias = [tape.parameter("vision.patch_embedding.bias", (hidden,))] if style.bias else []
        x = tape.product(pixels, kernel, count * hidden, bias, convolution=True)
        if style.class_token:
            x = tape.joined([tape.parameter("vision.class_embedding", (hidden,)), x])
            x.resize(self.rows * hidden)
        if style.table:
            places = self.patches + style.class_token
            place = tape.embedding(tape.constant(places, INDEX), "vision.position_embedding", places, hidden)
            x = tape.add(x, place)
        return self._norm(x, "vision.pre_layernorm") if style.first_norm else x

    def _block(self, x: Value, turns: list[Value]) -> Value:
        tape = self.tape
        x = tape.add(x, self._attention(self._norm(x, "layer_norm1"), turns))
        y = self._norm(x, "layer_norm2")
        if not self.style.gated:
            return tape.add(x, mlp(tape, y, ("fc1", "fc2"), (self.hidden, self.inner, self.act), self.style.mlp_bias))
        sizes, bias = (self.hidden, self.inner), self.style.mlp_bias
        gate = layers.activation(tape, tape.linear(y, "gate_proj", *sizes, bias), self.act)
        y = tape.mul(gate, tape.linear(y, "up_proj", *sizes, bias))
        return tape.add(x, tape.linear(y, "down_proj", self.inner, self.hidden, bias))

    def _attention(self, x: Value, turns: list[Value]) -> Value:
        tape, hidden, bias = self.tape, self.hidden, self.style.attention_bias
        if self.style.fused:
            both = tape.linear(x, "qkv", hidden, 3 * hidden, bias)
            q, k, v = (tape.part(both, x.count) for _ in range(3))
        else:
            q, k, v = (tape.linear(x, name, hidden, hidden, bias) for name in ("q_proj", "k_proj", "v_proj"))
        if turns:
            width = q.width
            q, k = (layers.rotary(tape, tape.cast(each, FULL), turns[0], turns[1]) for each in (q, k))
            q, k = (tape.cast(each, width) for each in (q, k))
        mask = turns[2] if len(turns) > 2 else None
        y = tape.attention(q, k, v, self.heads * self.rows, mask)
        y = tape.copy(y) if self.style.fused else y  # joined from the images, which are computed one by one
        return tape.linear(y, "out_proj", hidden, hidden, bias)


# -- models ----------------------------------------------------------------------------------------------------------


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
        pixels, kernel, batch.size * patches * hidden, [tape.parameter("patch_embeddings.bias", (hidden,))],
        convolution=True,
    )  # fmt: skip
    x = tape.joined([tape.parameter("cls_token", (1, 1, hidden)), x])
    x.resize(rows * hidden)
    places = tape.parameter("position_embeddings", (1, patches + 1, hidden))
    x = tape.dropout(tape.add(x, places), dropped)
    names, bias = ("q_proj", "k_proj", "v_proj", "o_proj"), config.flag("qkv_bias", True)
    for number in range(config.blocks("num_hidden_layers")):
        with tape.block(f"layers.{number}"):
            y = tape.layer_norm(x, "layernorm_before", hidden)
            x = tape.add(Heads(names, hidden, heads, bias, dropped)(tape, y, y), x)
            y = tape.layer_norm(x, "layernorm_after", hidden)
            x = tape.add(tape.dropout(mlp(tape, y, ("fc1", "fc2"), (hidden, inner, act)), dropped), x)
    x = tape.head(tape.layer_norm(x, "layernorm", hidden))
    logits = tape.linear(tape.part(x, batch.size * hidden), "classifier", hidden, labels, True)
    return tape.cross_entropy(logits, batch.size)


def contrastive(tape: Tape, config: ModelConfig, batch: Batch) -> Value:
    """CLIP and SigLIP: an encoder of images and one of text, and the loss of their similarities."""
    sound = config.architecture == "siglip"
    images = Tower(tape, config.section("vision_config", f"{config.architecture}_vision_model"), batch)
    text = config.section("text_config", f"{config.architecture}_text_model")
    hidden, heads, inner = (text.size(key) for key in ("hidden_size", "num_attention_heads", "intermediate_size"))
    act = text.word("hidden_act", default="gelu")
    seen = images.run()
    seen = images.pooled(seen)
    x = tape.embedding(token_ids(tape, batch.tokens), "text.token_embedding", text.size("vocab_size"), hidden)
    places = text.size("max_position_embeddings")
    place = tape.embedding(tape.constant(batch.length, INDEX), "text.position_embedding", places, hidden)
    x = tape.add(x, place)
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    for number in range(text.blocks("num_hidden_layers")):
        with tape.block(f"text.layers.{number}"):
            y = tape.layer_norm(x, "layer_norm1", hidden)
            x = tape.add(x, Heads(names, hidden, heads)(tape, y, y))
            x = tape.add(x, mlp(tape, tape.layer_norm(x, "layer_norm2", hidden), ("fc1", "fc2"), (hidden, inner, act)))
    x = tape.layer_norm(x, "text.final_layer_norm", hidden)
    read = tape.gathered(x, batch.size * hidden, batch.size)
    if sound:
        shared = text.size("projection_size", default=hidden)
        read = tape.linear(read, "text.head", hidden, shared, True)
        tape.parameter("logit_bias", (1,))
    else:
        shared = config.size("projection_dim", default=512)
        seen = tape.linear(seen, "visual_projection", images.hidden, shared)
        read = tape.linear(read, "text_projection", hidden, shared)
    scale = tape.parameter("logit_scale", (1,) if sound else ())
    seen, read = (
        tape.mul(each, tape.pointwise(tape.mean(each, batch.size), "norm", "output")) for each in (seen, read)
    )
    logits = tape.mul(tape.matmul(tape.head(read), seen, batch.size**2), tape.pointwise(scale, "exp", "output"))
    return tape.cross_entropy(logits, batch.size)


def seeing(tape: Tape, config: ModelConfig, batch: Batch) -> Value:
    """A decoder that sees one image for each row: its rows stand at the place of some tokens."""
    family = SEEING[config.architecture]
    vision = config.section("vision_config", family.tower)
    text = config.section("text_config", family.text, flat=True)
    style = family.style or STYLES.get(text.architecture)
    if style is None:
        raise ConfigError(
            f"{text.path}: the decoder `{text.architecture}` is not known; known are {', '.join(sorted(STYLES))}"
        )
    tower = Tower(tape, vision, batch)
    layer = config.values.get("vision_feature_layer", -1)
    layer = layer if isinstance(layer, int) else -1
    count = tower._size("num_hidden_layers")
    x = tower.run(None if layer == -1 else count + 1 + layer if layer < 0 else layer)
    if tower.style.pooled and vision.flag("vision_use_head", True):
        tower.pooled(x)  # the decoder does not use it
    width = text.size("hidden_size")
    x = _projected(config, tower, x, width)
    return Decoder(tape, text, batch, style, masked=family.masked).run(x)


def _projected(config: ModelConfig, tower: Tower, x: Value, width: int) -> Value:
    """Return the rows of a tower in the width of the decoder."""
    tape, kind = tower.tape, SEEING[config.architecture].projector
    hidden, rows = tower.hidden, tower.images * tower.patches
    if kind == "pooled":  # Gemma 3
        tokens = tower.images * config.size("mm_tokens_per_image", default=256)
        x = tape.new("avg_pool", tape.copy(x), tokens * hidden)
        x = layers.gemma_norm(tape, x, "projector.mm_soft_emb_norm", hidden)
        weight = tape.parameter("projector.mm_input_projection_weight", (hidden, width), "linear")
        return tape.product(x, weight, tokens * width)
    merge = config.size("spatial_merge_size", default=2)
    if kind == "merger":  # Qwen
        wide = hidden * (tower.config.size("spatial_merge_size", default=2)) ** 2
        x = tower._norm(x, "merger.ln_q")
        x = layers.activation(tape, tape.linear(x, "merger.mlp.0", wide, wide, True), "gelu")
        return tape.linear(x, "merger.mlp.2", wide, tower.config.size("out_hidden_size", "hidden_size"), True)
    if kind == "linear":
        return tape.linear(x, "projector.linear", hidden, width, True)
    bias = config.flag("multimodal_projector_bias", kind == "two")
    if kind == "merged":  # Mistral 3
        x = layers.rms_norm(tape, x, "projector.norm", hidden)
        x = tape.linear(tape.copy(x), "projector.patch_merger", hidden * merge**2, hidden)
    elif tower.style.class_token:
        x = tape.copy(tape.part(x, rows * hidden))
    act = config.word("projector_hidden_act", default="gelu")
    x = layers.activation(tape, tape.linear(x, "projector.linear_1", hidden, width, bias), act)
    return tape.linear(x, "projector.linear_2", width, width, bias)


@dataclasses.dataclass(frozen=True)
class Seeing:
    """The parts of a family: the default tower, the default decoder, and how rows get from one to the other.

    masked: the tokens of an image see each other, so attention needs a mask. style: of a decoder that is no family.
    """

    tower: str
    text: str
    projector: Literal["two", "linear", "merged", "merger", "pooled"]
    masked: bool = False
    style: DecoderStyle | None = None


#: Qwen 2 with positions of each row, as images have two dimensions.
_QWEN_TEXT = DecoderStyle(qkv_bias=(True, ""), turning="rows")

SEEING: dict[str, Seeing] = {
    "llava": Seeing("clip_vision_model", "llama", "two"),
    "mistral3": Seeing("pixtral", "mistral", "merged"),
    "gemma3": Seeing("siglip_vision_model", "gemma3_text", "pooled", masked=True),
    "paligemma": Seeing("siglip_vision_model", "gemma", "linear", masked=True),
    "qwen2_vl": Seeing("qwen2_vl", "qwen2_vl_text", "merger", style=_QWEN_TEXT),
    "qwen2_5_vl": Seeing("qwen2_5_vl", "qwen2_5_vl_text", "merger", style=_QWEN_TEXT),
}

PROGRAMS: Mapping[str, Callable[[Tape, ModelConfig, Batch], Value]] = {
    "vit": vit, "clip": contrastive, "siglip": contrastive, **dict.fromkeys(SEEING, seeing),
}  # fmt: skip
