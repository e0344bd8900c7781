"""Encoder-decoders like BART: for translation, summaries and speech."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mpguard.estimate.blocks import Batch, Heads, mlp, token_ids
from mpguard.estimate.reading import ModelConfig
from mpguard.estimate.tape import FULL, INDEX, Tape, Value


@dataclasses.dataclass(frozen=True)
class Seq2SeqStyle:
    """How a family differs from BART.

    before: norms stand before attention and MLP, and at the end of both sides. embedding_norm: a norm follows the
    embeddings. positions: a table with two more entries; one with as many as there are positions; or no parameters.
    logit_bias: a bias that is not trained is added to the logits. speech: the encoder reads features of sound, and
    keys have no bias.
    """

    before: bool = False
    embedding_norm: bool = False
    positions: Literal["offset", "table", "computed"] = "offset"
    logit_bias: bool = True
    speech: bool = False


STYLES: dict[str, Seq2SeqStyle] = {
    "bart": Seq2SeqStyle(embedding_norm=True),
    "mbart": Seq2SeqStyle(before=True, embedding_norm=True),
    "pegasus": Seq2SeqStyle(before=True, positions="table"),
    "marian": Seq2SeqStyle(positions="table"),
    "m2m_100": Seq2SeqStyle(before=True, positions="computed", logit_bias=False),
    "whisper": Seq2SeqStyle(before=True, positions="table", logit_bias=False, speech=True),
}


class Seq2Seq:
    """An encoder and a decoder of one of the styles, both with rows of the given length."""

    def __init__(self, tape: Tape, config: ModelConfig, batch: Batch) -> None:
        self.tape, self.config, self.batch, self.style = tape, config, batch, STYLES[config.architecture]
        self.hidden, self.words = config.size("d_model"), config.size("vocab_size")
        self.act = config.word("activation_function", default="gelu")
        self.dropped = config.share("dropout", default=0.1)

    def run(self) -> Value:
        """Run the model and its loss, and return the loss."""
        tape, config = self.tape, self.config
        source = self._heard() if self.style.speech else self._embedded("encoder")
        for number in range(config.blocks("encoder_layers")):
            with tape.block(f"encoder.layers.{number}"):
                source = self._attended(source, None, "self_attn", config.size("encoder_attention_heads"))
                source = self._fed(source, config.size("encoder_ffn_dim"))
        source = self._ended(source, "encoder")
        x = self._embedded("decoder")
        for number in range(config.blocks("decoder_layers")):
            with tape.block(f"decoder.layers.{number}"):
                x = self._attended(x, None, "self_attn", config.size("decoder_attention_heads"))
                x = self._attended(x, source, "encoder_attn", config.size("decoder_attention_heads"))
                x = self._fed(x, config.size("decoder_ffn_dim"))
        tape.returned.append(source)
        return self._loss(self._ended(x, "decoder"))

    def _embedded(self, side: str) -> Value:
        tape, config, batch, hidden, style = self.tape, self.config, self.batch, self.hidden, self.style
        x = tape.embedding(token_ids(tape, batch.tokens), "shared", self.words, hidden)
        x = x if style.speech else tape.pointwise(x, "mul", "")
        if style.positions == "computed":
            x = tape.add(x, tape.constant(batch.tokens * hidden, x.width))
        else:
            places = config.size("max_target_positions", "max_position_embeddings", default=1024)
            offset = style.positions == "offset"
            rows = tape.constant(batch.tokens if offset else batch.length, INDEX)
            x = tape.add(x, tape.embedding(rows, f"{side}.embed_positions", places + 2 * offset, hidden))
        x = tape.layer_norm(x, f"{side}.layernorm_embedding", hidden) if style.embedding_norm else x
        return tape.dropout(x, self.dropped)

    def _heard(self) -> Value:
        """Two convolutions over features of sound, the second with half of the places."""
        tape, config, hidden, size = self.tape, self.config, self.hidden, self.batch.size
        bins, places = config.size("num_mel_bins", default=80), config.size("max_source_positions", default=1500)
        x = tape.constant(size * bins * 2 * places, tape.precision.weights, "input")
        for name, inputs, count in (("conv1", bins, 2 * places), ("conv2", hidden, places)):
            kernel = tape.parameter(f"encoder.{name}.weight", (hidden, inputs, 3), "linear")
            bias = tape.parameter(f"encoder.{name}.bias", (hidden,))
            x = tape.pointwise(tape.product(x, kernel, size * count * hidden, [bias], convolution=True), "gelu")
        place = tape.embedding(tape.constant(places, INDEX), "encoder.embed_positions", places, hidden)
        return tape.dropout(tape.add(x, place), self.dropped)

    def _attended(self, x: Value, source: Value | None, name: str, heads: int) -> Value:
        tape, hidden = self.tape, self.hidden
        names = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj", f"{name}.out_proj")
        y = tape.layer_norm(x, f"{name}_layer_norm", hidden) if self.style.before else x
        attention = Heads(names, hidden, heads, True, self.dropped, self.style.speech, not self.style.speech)
        x = tape.add(x, attention(tape, y, y if source is None else source))
        return x if self.style.before else tape.layer_norm(x, f"{name}_layer_norm", hidden)

    def _fed(self, x: Value, inner: int) -> Value:
        tape, hidden = self.tape, self.hidden
        y = tape.layer_norm(x, "final_layer_norm", hidden) if self.style.before else x
        y = mlp(tape, y, ("fc1", "fc2"), (hidden, inner, self.act))
        x = tape.add(x, tape.dropout(y, self.dropped))
        return x if self.style.before else tape.layer_norm(x, "final_layer_norm", hidden)

    def _ended(self, x: Value, side: str) -> Value:
        return self.tape.layer_norm(x, f"{side}.layer_norm", self.hidden) if self.style.before else x

    def _loss(self, x: Value) -> Value:
        tape, words, rows = self.tape, self.words, self.batch.tokens
        table = tape.parameter("shared", (words, self.hidden), "embedding")
        logits = tape.product(tape.head(x), table, rows * words)
        if self.style.logit_bias:
            tape.buffer("final_logits_bias", words, tape.precision.weights)
            logits = tape.pointwise(logits, "add", "")
            if tape.precision.autocast:  # the bias is FP32
                logits = tape.cast(logits, FULL)
        return tape.cross_entropy(logits, rows)


def run(tape: Tape, config: ModelConfig, batch: Batch) -> Value:
    """Run an encoder-decoder whose family is in `STYLES`."""
    return Seq2Seq(tape, config, batch).run()
