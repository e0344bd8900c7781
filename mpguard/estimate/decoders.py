"""Decoder-only language models, as transformers 5.23 builds and runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from mpguard.estimate import layers
from mpguard.estimate.reading import ModelConfig
from mpguard.estimate.tape import FULL, INDEX, Tape, Value

Norm = Callable[[Tape, Value, str, int], Value]


@dataclasses.dataclass(frozen=True)
class Batch:
    """The inputs of a step."""

    size: int
    length: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.size * self.length


@dataclasses.dataclass(frozen=True)
class DecoderStyle:
    """How a family of decoders differs from LLaMA.

    qkv_bias, out_bias, mlp_bias: the default, and the key that overrides it. qk_norm: of each head, or of all heads
    together. mlp: with a gate, with the gate in one product, or without. after: norms on the results of attention and
    MLP, instead of or as well as on their inputs. parallel: attention and MLP have one input. tied: the default of
    `tie_word_embeddings`. joins: queries are joined from parts, so the result of attention, which is laid out as
    they are, is copied. scaled: the embedding, the residual branches, the logits are multiplied by a number.
    """

    norm: Norm = layers.rms_norm
    qkv_bias: tuple[bool, str] = (False, "attention_bias")
    out_bias: tuple[bool, str] = (False, "attention_bias")
    mlp_bias: tuple[bool, str] = (False, "mlp_bias")
    qk_norm: Literal["head", "all", ""] = ""
    fused: bool = False
    gated: bool = True
    before: bool = True
    after: bool = False
    parallel: bool = False
    tied: bool = False
    rotary: float = 1.0
    act: str = "silu"
    scaled: tuple[str, ...] = ()
    head_bias: bool = False
    residual_dropout: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    final_norm: str = "norm"
    joins: bool = False


def _layer_norm(tape: Tape, x: Value, name: str, width: int) -> Value:
    return tape.layer_norm(x, name, width)


STYLES: dict[str, DecoderStyle] = {
    "llama": DecoderStyle(),
    "mistral": DecoderStyle(),
    "qwen2": DecoderStyle(qkv_bias=(True, "")),
    "qwen3": DecoderStyle(qk_norm="head"),
    "smollm3": DecoderStyle(tied=True),
    "granite": DecoderStyle(scaled=("embedding", "residual", "logits")),
    "olmo2": DecoderStyle(norm=layers.olmo_norm, qk_norm="all", before=False, after=True),
    "gemma": DecoderStyle(norm=layers.gemma_norm, tied=True, act="gelu_pytorch_tanh", scaled=("embedding",)),
    "gemma3_text": DecoderStyle(
        norm=layers.gemma_norm, tied=True, act="gelu_pytorch_tanh", scaled=("embedding",), qk_norm="head", after=True
    ),
    "phi3": DecoderStyle(fused=True, joins=True, residual_dropout=("resid_pdrop",)),
    "phi": DecoderStyle(
        norm=_layer_norm, qkv_bias=(True, ""), out_bias=(True, ""), mlp_bias=(True, ""), gated=False, parallel=True,
        rotary=0.5, act="gelu_new", head_bias=True, joins=True, residual_dropout=("resid_pdrop",),
    ),
    "stablelm": DecoderStyle(
        norm=_layer_norm, qkv_bias=(False, "use_qkv_bias"), out_bias=(False, ""), rotary=0.25, joins=True
    ),
    "starcoder2": DecoderStyle(
        norm=_layer_norm, qkv_bias=(True, "use_bias"), out_bias=(True, "use_bias"), mlp_bias=(True, "use_bias"),
        gated=False, tied=True, act="gelu_pytorch_tanh", residual_dropout=("residual_dropout",),
    ),
    "mixtral": DecoderStyle(experts=("num_local_experts", "num_experts")),
    "qwen2_moe": DecoderStyle(qkv_bias=(True, "qkv_bias"), out_bias=(False, ""), experts=("num_experts",)),
    "qwen3_moe": DecoderStyle(qk_norm="head", experts=("num_experts", "num_local_experts")),
    "olmoe": DecoderStyle(qk_norm="all", experts=("num_experts",)),
}  # fmt: skip


class Decoder:
    """A decoder of one of the styles."""

    def __init__(self, tape: Tape, config: ModelConfig, batch: Batch, style: DecoderStyle) -> None:
        self.tape, self.config, self.batch, self.style = tape, config, batch, style
        self.hidden = config.size("hidden_size")
        self.heads = config.size("num_attention_heads")
        self.groups = config.size("num_key_value_heads", default=self.heads)
        self.head = config.size(
            "head_dim", default=128 if config.architecture == "qwen3" else self.hidden // self.heads
        )
        self.act = config.word("hidden_act", "hidden_activation", default=style.act)
        rope = config.part("rope_parameters")
        share = rope.get("partial_rotary_factor", config.share("partial_rotary_factor", default=style.rotary))
        self.rotary = int(self.head * share) / self.head

    def run(self) -> Value:
        """Run the model and its loss, and return the loss."""
        tape, config, batch, hidden = self.tape, self.config, self.batch, self.hidden
        words = config.size("vocab_size")
        count = config.size("num_hidden_layers")
        x = tape.embedding(tape.constant(batch.tokens, INDEX, "input"), "embed_tokens", words, hidden)
        if "embedding" in self.style.scaled:
            x = tape.pointwise(x, "mul", "")
        turns = [[tape.constant(int(batch.length * self.head * self.rotary), x.width) for _ in range(2)]
                 for _ in range(2)]  # fmt: skip
        for number in range(count):
            with tape.block(f"layers.{number}"):
                x = self._layer(x, turns[self._local(number)] if self._turns(number) else [], number)
        x = tape.head(self.style.norm(tape, x, self.style.final_norm, hidden))
        return self._loss(x, words)

    def _turns(self, number: int) -> bool:
        """True if a layer has rotary embeddings: in SmolLM3 every fourth one has none."""
        if self.config.architecture != "smollm3":
            return True
        listed = self.config.numbers("no_rope_layers")
        return (
            bool(listed[number])
            if listed
            else (number + 1) % self.config.size("no_rope_layer_interval", default=4) != 0
        )

    def _local(self, number: int) -> bool:
        """True if a layer has other rotary embeddings: in Gemma 3 those with a sliding window, all but every sixth."""
        if self.config.architecture != "gemma3_text":
            return False
        kinds = self.config.values.get("layer_types")
        if isinstance(kinds, list) and number < len(kinds):
            return bool(kinds[number] == "sliding_attention")
        return (number + 1) % self.config.size("sliding_window_pattern", default=6) != 0

    def _loss(self, x: Value, words: int) -> Value:
        tape, style = self.tape, self.style
        if self.config.flag("tie_word_embeddings", style.tied):
            table = tape.parameter("embed_tokens", (words, self.hidden), "embedding")
            bias = [tape.parameter("lm_head.bias", (words,))] if style.head_bias else []
            logits = tape.product(x, table, self.batch.tokens * words, bias)
        else:
            logits = tape.linear(x, "lm_head", self.hidden, words, style.head_bias)
        if "logits" in style.scaled:
            logits = tape.pointwise(logits, "div", "")
        return tape.cross_entropy(logits, self.batch.tokens, full=True)

    def _layer(self, x: Value, turns: list[Value], number: int) -> Value:
        tape, style, hidden = self.tape, self.style, self.hidden
        x_in = style.norm(tape, x, "input_layernorm", hidden) if style.before else x
        attended = self._dropped(self._attention(x_in, turns))
        if style.after:
            attended = style.norm(tape, attended, "post_attention_layernorm", hidden)
        parallel = style.parallel or self.config.flag("use_parallel_residual", False)
        if parallel:
            return tape.add(tape.add(x, attended), self._dropped(self._mlp(x_in, number)))
        x = tape.add(x, self._scaled(attended))
        name = "pre_feedforward_layernorm" if style.after else "post_attention_layernorm"
        y = self._dropped(self._mlp(style.norm(tape, x, name, hidden) if style.before else x, number))
        if style.after:
            y = style.norm(tape, y, "post_feedforward_layernorm", hidden)
        return tape.add(x, self._scaled(y))

    def _scaled(self, x: Value) -> Value:
        return self.tape.pointwise(x, "mul", "") if "residual" in self.style.scaled else x

    def _dropped(self, x: Value) -> Value:
        keys = self.style.residual_dropout
        return self.tape.dropout(x, self.config.share(*keys)) if keys else x

    def _biased(self, bias: tuple[bool, str]) -> bool:
        return self.config.flag(bias[1], bias[0]) if bias[1] else bias[0]

    def _attention(self, x: Value, turns: list[Value]) -> Value:
        tape, style, hidden = self.tape, self.style, self.hidden
        wide, narrow = self.heads * self.head, self.groups * self.head
        if style.fused:
            qkv = tape.linear(x, "qkv_proj", hidden, wide + 2 * narrow)
            q, k, v = (tape.part(qkv, self.batch.tokens * width) for width in (wide, narrow, narrow))
        else:
            bias = self._biased(style.qkv_bias)
            q = tape.linear(x, "q_proj", hidden, wide, bias)
            k = tape.linear(x, "k_proj", hidden, narrow, bias)
            v = tape.linear(x, "v_proj", hidden, narrow, bias)
        q, k = self._normed(q, k)
        if turns:
            q, k = (layers.partial_rotary(tape, each, self.rotary, turns[0], turns[1]) for each in (q, k))
            if self.config.architecture == "olmo2":  # turned in FP32 under autocast, and cast back
                q, k = (tape.cast(each, tape.precision.compute) for each in (q, k))
        y = tape.attention(q, k, v, self.heads * self.batch.tokens)
        if style.joins:
            y = tape.copy(y)
        return tape.linear(y, "o_proj", wide, hidden, self._biased(style.out_bias))

    def _normed(self, q: Value, k: Value) -> tuple[Value, Value]:
        style, names = self.style, ("q_norm", "k_norm")
        if style.qk_norm == "head":
            q, k = (style.norm(self.tape, each, name, self.head) for each, name in zip((q, k), names, strict=True))
        elif style.qk_norm == "all":
            widths = (self.heads * self.head, self.groups * self.head)
            q, k = (style.norm(self.tape, each, name, width)
                    for each, name, width in zip((q, k), names, widths, strict=True))  # fmt: skip
        return q, k

    def _mlp(self, x: Value, number: int) -> Value:
        if self.style.experts and self._sparse(number):
            return self._experts(x)
        return self._dense(x, "mlp", self.config.size("intermediate_size"))

    def _dense(self, x: Value, name: str, width: int) -> Value:
        tape, style, hidden = self.tape, self.style, self.hidden
        bias = self._biased(style.mlp_bias)
        if not style.gated:
            y = layers.activation(tape, tape.linear(x, f"{name}.fc1", hidden, width, bias), self.act)
        elif style.fused:
            both = tape.linear(x, f"{name}.gate_up_proj", hidden, 2 * width)
            gate, up = (tape.part(both, both.count // 2) for _ in range(2))
            y = tape.mul(up, layers.activation(tape, gate, self.act))
        else:
            gate = layers.activation(tape, tape.linear(x, f"{name}.gate_proj", hidden, width, bias), self.act)
            y = tape.mul(gate, tape.linear(x, f"{name}.up_proj", hidden, width, bias))
        return tape.linear(y, f"{name}.down_proj", width, hidden, bias)

    def _sparse(self, number: int) -> bool:
        """True if a layer has experts."""
        step = self.config.size("decoder_sparse_step", default=1)
        return number not in self.config.numbers("mlp_only_layers") and (number + 1) % step == 0

    def _experts(self, x: Value) -> Value:
        """Experts by grouped products: each token is copied for each of its experts. mpguard lowers their inputs."""
        tape, config, hidden, tokens = self.tape, self.config, self.hidden, self.batch.tokens
        number = config.size(*self.style.experts)
        width = config.size("moe_intermediate_size", "intermediate_size")
        chosen = tokens * config.size("num_experts_per_tok")
        logits = tape.product(x, tape.parameter("mlp.gate.weight", (number, hidden), "linear"), tokens * number)
        weights = tape.gathered(tape.softmax(logits, FULL), chosen, chosen)
        if config.flag("norm_topk_prob", config.architecture == "mixtral"):
            weights = tape.mul(weights, tape.pointwise(tape.mean(weights, tokens), "reciprocal", "output"))
        weights = tape.gathered(tape.cast(weights, logits.width), chosen, chosen)
        both = tape.expert_product(
            tape.gathered(x, chosen * hidden, chosen), "gate_up_proj", (number, 2 * width, hidden)
        )
        gate, up = (tape.part(both, both.count // 2) for _ in range(2))
        y = tape.mul(layers.activation(tape, gate, self.act), up)
        y = tape.expert_product(y, "down_proj", (number, hidden, width))
        y = tape.gathered(tape.mul(y, weights), chosen * hidden, chosen)
        y = tape.cast(tape.mean(y, tokens * hidden), x.width)
        if config.architecture != "qwen2_moe":
            return y
        shared = self._dense(x, "mlp.shared_expert", config.size("shared_expert_intermediate_size"))
        gate = tape.pointwise(tape.linear(x, "mlp.shared_expert_gate", hidden, 1), "sigmoid", "output")
        return tape.add(y, tape.mul(gate, shared))


def run(tape: Tape, config: ModelConfig, batch: Batch) -> Value:
    """Run a decoder whose family is in `STYLES`."""
    return Decoder(tape, config, batch, STYLES[config.architecture]).run()
