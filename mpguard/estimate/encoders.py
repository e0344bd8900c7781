"""Encoders with the head of masked language models: BERT and its relatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from mpguard.estimate import layers
from mpguard.estimate.blocks import Batch, Heads, mlp, token_ids
from mpguard.estimate.reading import ModelConfig
from mpguard.estimate.tape import INDEX, Tape, Value


@dataclasses.dataclass(frozen=True)
class EncoderStyle:
    """How a family of encoders differs from BERT.

    rows: each row has positions of its own. kinds: the default number of token types. attention: by a fused kernel, or
    with scores to which a bias of each distance is added, or with matmuls of contents and positions.
    """

    rows: bool = False
    kinds: int = 2
    attention: Literal["fused", "biased", "disentangled"] = "fused"


STYLES: dict[str, EncoderStyle] = {
    "bert": EncoderStyle(),
    "electra": EncoderStyle(),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), EncoderStyle(rows=True)),
    "mpnet": EncoderStyle(rows=True, kinds=0, attention="biased"),
    "deberta-v2": EncoderStyle(kinds=0, attention="disentangled"),
}

_NAMES = ("attention.query", "attention.key", "attention.value", "attention.output")


class Encoder:
    """An encoder of one of the styles."""

    def __init__(self, tape: Tape, config: ModelConfig, batch: Batch) -> None:
        self.tape, self.config, self.batch, self.style = tape, config, batch, STYLES[config.architecture]
        self.hidden, self.words = config.size("hidden_size"), config.size("vocab_size")
        self.inner, self.heads = config.size("intermediate_size"), config.size("num_attention_heads")
        self.act = config.word("hidden_act", default="gelu")
        self.dropped = config.share("hidden_dropout_prob", default=0.1)
        self.narrow = config.size("embedding_size", default=self.hidden)

    def run(self) -> Value:
        """Run the model and its loss, and return the loss."""
        tape, hidden = self.tape, self.hidden
        x = first = self._embedded()
        attention = self._attention()
        for number in range(self.config.blocks("num_hidden_layers")):
            with tape.block(f"layer.{number}"):
                x = tape.layer_norm(tape.add(attention(x), x), "attention.LayerNorm", hidden)
                y = mlp(tape, x, ("intermediate.dense", "output.dense"), (hidden, self.inner, self.act))
                y = tape.layer_norm(tape.add(tape.dropout(y, self.dropped), x), "output.LayerNorm", hidden)
            x = self._convolved(first, y) if number == 0 else y
        return self._loss(x)

    def _convolved(self, x: Value, y: Value) -> Value:
        """Add a convolution of the embeddings to the result of the first block, where DeBERTa has one."""
        tape, config, hidden = self.tape, self.config, self.hidden
        size = config.count("conv_kernel_size") if self.style.attention == "disentangled" else 0
        if not size:
            return y
        shape = (hidden, hidden // config.size("conv_groups", default=1), size)
        kernel, bias = tape.parameter("conv.weight", shape, "linear"), [tape.parameter("conv.bias", (hidden,))]
        z = tape.copy(tape.product(tape.copy(x), kernel, x.count, bias))
        z = layers.activation(tape, tape.dropout(z, self.dropped), config.word("conv_act", default="tanh"))
        return tape.layer_norm(tape.add(y, z), "conv.LayerNorm", hidden)

    def _embedded(self) -> Value:
        tape, config, batch, narrow = self.tape, self.config, self.batch, self.narrow
        biased = self.style.attention != "disentangled" or config.flag("position_biased_input", True)
        x = tape.embedding(token_ids(tape, batch.tokens), "word_embeddings", self.words, narrow)
        if kinds := config.count("type_vocab_size", default=self.style.kinds):
            rows = tape.constant(batch.tokens, INDEX)
            x = tape.add(x, tape.embedding(rows, "token_type_embeddings", kinds, narrow))
        if biased:
            places = config.size("max_position_embeddings", default=512)
            rows = tape.constant(batch.tokens if self.style.rows else batch.length, INDEX)
            x = tape.add(x, tape.embedding(rows, "position_embeddings", places, narrow))
        x = tape.dropout(tape.layer_norm(x, "embeddings.LayerNorm", narrow), self.dropped)
        return x if narrow == self.hidden else tape.linear(x, "embeddings_project", narrow, self.hidden, True)

    def _loss(self, x: Value) -> Value:
        tape, config, words, narrow = self.tape, self.config, self.words, self.narrow
        act = self.act if self.style.attention == "disentangled" else "gelu"
        x = layers.activation(tape, tape.linear(tape.head(x), "head.dense", self.hidden, narrow, True), act)
        x = tape.layer_norm(x, "head.LayerNorm", narrow)
        tied = config.flag("tie_word_embeddings", True)
        table = tape.parameter("word_embeddings" if tied else "head.decoder", (words, narrow), "embedding")
        bias = tape.parameter("head.bias", (words,))
        return tape.cross_entropy(tape.product(x, table, self.batch.tokens * words, [bias]), self.batch.tokens)

    # -- attention ---------------------------------------------------------------------------------------------------

    def _attention(self) -> Callable[[Value], Value]:
        """Return the function that a block calls; what blocks share is computed first."""
        if self.style.attention == "biased":
            shared = self._distance_bias()
            return lambda x: self._biased(x, shared)
        if self.style.attention == "disentangled":
            positions = self._positions()
            return lambda x: self._disentangled(x, positions)
        heads = Heads(_NAMES, self.hidden, self.heads, True, self.dropped)
        return lambda x: heads(self.tape, x, x)

    def _distance_bias(self) -> Value:
        tape, batch = self.tape, self.batch
        buckets = self.config.size("relative_attention_num_buckets", default=32)
        places = tape.constant(batch.length**2, INDEX)
        bias = tape.embedding(places, "relative_attention_bias", buckets, self.heads)
        return tape.repeated(bias, batch.size)

    def _biased(self, x: Value, bias: Value) -> Value:
        tape, hidden = self.tape, self.hidden
        q, k, v = (tape.linear(x, name, hidden, hidden, True) for name in _NAMES[:3])
        y = tape.eager_attention(q, k, v, self.heads * self.batch.tokens, self.batch.length, bias=bias, full=False)
        return tape.dropout(tape.linear(y, _NAMES[3], hidden, hidden, True), self.dropped)

    def _positions(self) -> Value | None:
        """Return the embeddings of distances, which all blocks share; None without them."""
        tape, config = self.tape, self.config
        if not config.flag("relative_attention", False):
            return None
        span = config.size("position_buckets") if config.share("position_buckets", default=-1) > 0 else (
            config.size("max_relative_positions") if config.share("max_relative_positions", default=-1) > 0
            else config.size("max_position_embeddings", default=512)
        )  # fmt: skip
        table = tape.parameter("rel_embeddings", (2 * span, self.hidden), "embedding")
        normed = "layer_norm" in config.word("norm_rel_ebd", default="none")
        return tape.layer_norm(table, "rel_embeddings.LayerNorm", self.hidden) if normed else table

    def _disentangled(self, x: Value, positions: Value | None) -> Value:
        """Attention of DeBERTa: contents with contents, contents with positions, positions with contents."""
        tape, config, hidden, batch = self.tape, self.config, self.hidden, self.batch
        q, k, v = (tape.copy(tape.linear(x, name, hidden, hidden, True)) for name in _NAMES[:3])
        scores = self._scores(q, tape.pointwise(k, "div", ""), batch.length)
        kinds = config.values.get("pos_att_type") or ()
        for kind, own, name in (("c2p", q, "key"), ("p2c", k, "query")):
            if positions is not None and kind in kinds:
                shared, places = config.flag("share_att_key", False), tape.dropout(positions, self.dropped)
                span = positions.count // hidden
                product = f"attention.{name}" if shared else f"attention.pos_{name}"
                of_places = tape.linear(places, product, hidden, hidden, True)
                of_places = tape.repeated(of_places, batch.size)
                each = self._scores(own, of_places, span)
                each = tape.gathered(each, scores.count, batch.length**2, keeps=True)
                scores = tape.add(scores, tape.pointwise(each, "div", ""))
        y = tape.eager_weights(scores, v, full=False, mask=batch.tokens * batch.length)
        return tape.dropout(tape.linear(y, _NAMES[3], hidden, hidden, True), self.dropped)

    def _scores(self, a: Value, b: Value, columns: int) -> Value:
        """Return the matmuls of the rows of two values, head by head."""
        tape = self.tape
        return tape.matmul(a, b, self.heads * self.batch.tokens * columns)


def run(tape: Tape, config: ModelConfig, batch: Batch) -> Value:
    """Run an encoder whose family is in `STYLES`."""
    return Encoder(tape, config, batch).run()
