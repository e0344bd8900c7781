"""Decoder-only language models, as transformers 5.23 builds and runs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from mpguard.core.errors import ConfigError
from mpguard.estimate import layers
from mpguard.estimate.blocks import Batch
from mpguard.estimate.reading import ModelConfig
from mpguard.estimate.tape import FULL, INDEX, Tape, Value

Norm = Callable[[Tape, Value, str, int], Value]


@dataclasses.dataclass(frozen=True)
class DecoderStyle:
    """How a family of decoders differs from LLaMA.

    qkv_bias, out_bias, mlp_bias: the default, and the key that overrides it.
    qk_norm: of each head, or of all heads together.
    fused: the matmuls of queries, keys and values are one, and so are those of the MLP; or the MLP's alone.
    gated: the MLP has a gate.
    before, after: norms on the inputs of attention and MLP, and on their results.
    parallel: attention and MLP have one input.
    tied: the default of `tie_word_embeddings`.
    rotary: the default share of a head that has positions. turning: how it is computed: by halves, in pairs, or by
    halves with cosines that each layer repeats, or that each row has. turned: the layers that have it.
    scaled: the embedding, the residual branches, the logits, the queries are multiplied by a number.
    eager: attention is no fused kernel, because scores are bounded (`cap`), or heads have a sink.
    latent: keys and values are made of one narrow matmul.
    joins: queries are joined from parts, so the result of attention, which is laid out as they are, is copied.
    experts: the keys of their number. router: a softmax of all experts, of the chosen ones, or a sigmoid.
    """

    norm: Norm = layers.rms_norm
    qkv_bias: tuple[bool, str] = (False, "attention_bias")
    out_bias: tuple[bool, str] = (False, "attention_bias")
    mlp_bias: tuple[bool, str] = (False, "mlp_bias")
    qk_norm: Literal["head", "all", ""] = ""
    fused: Literal["all", "mlp", ""] = ""
    turning: Literal["halves", "paired", "repeated", "rows"] = "halves"
    turned: Literal["all", "sliding", "listed"] = "all"
    eager: Literal["cap", "sinks", ""] = ""
    latent: bool = False
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
    router: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    final_norm: str = "norm"
    joins: bool = False


def _layer_norm(tape: Tape, x: Value, name: str, width: int) -> Value:
    return tape.layer_norm(x, name, width)


STYLES: dict[str, DecoderStyle] = {
    "llama": DecoderStyle(),
    "mistral": DecoderStyle(),
    "qwen2": DecoderStyle(qkv_bias=(True, "")),
    "qwen3": DecoderStyle(qk_norm="head"),
    "ministral3": DecoderStyle(scaled=("queries",)),
    "seed_oss": DecoderStyle(
        qkv_bias=(True, "attention_bias"), out_bias=(False, "attention_out_bias"),
        residual_dropout=("residual_dropout",),
    ),
    "ernie4_5": DecoderStyle(
        qkv_bias=(False, "use_bias"), out_bias=(False, "use_bias"), mlp_bias=(False, "use_bias"), tied=True,
        turning="repeated",
    ),
    "glm": DecoderStyle(
        qkv_bias=(False, "attention_bias"), out_bias=(False, ""), fused="mlp", rotary=0.5, turning="repeated",
        joins=True,
    ),
    "glm4": DecoderStyle(
        qkv_bias=(False, "attention_bias"), out_bias=(False, ""), fused="mlp", rotary=0.5, turning="repeated",
        joins=True, after=True,
    ),
    "cohere": DecoderStyle(norm=layers.cohere_norm, parallel=True, tied=True, scaled=("logits",)),
    "cohere2": DecoderStyle(
        norm=layers.cohere_norm, parallel=True, tied=True, scaled=("logits",), turned="sliding"
    ),
    "smollm3": DecoderStyle(tied=True, turned="listed"),
    "granite": DecoderStyle(scaled=("embedding", "residual", "logits")),
    "olmo2": DecoderStyle(norm=layers.olmo_norm, qk_norm="all", before=False, after=True),
    "olmo3": DecoderStyle(norm=layers.olmo_norm, qk_norm="all", before=False, after=True),
    "gemma": DecoderStyle(norm=layers.gemma_norm, tied=True, act="gelu_pytorch_tanh", scaled=("embedding",)),
    "gemma2": DecoderStyle(
        norm=layers.gemma_norm, tied=True, act="gelu_pytorch_tanh", scaled=("embedding",), after=True, eager="cap"
    ),
    "gemma3_text": DecoderStyle(
        norm=layers.gemma_norm, tied=True, act="gelu_pytorch_tanh", scaled=("embedding",), qk_norm="head", after=True
    ),
    "phi3": DecoderStyle(fused="all", joins=True, residual_dropout=("resid_pdrop",)),
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
    "deepseek_v3": DecoderStyle(
        latent=True, turning="paired", experts=("n_routed_experts", "num_local_experts"), router="sigmoid", joins=True
    ),
    "glm4_moe": DecoderStyle(
        qkv_bias=(False, "attention_bias"), out_bias=(False, ""), rotary=0.5, joins=True,
        experts=("n_routed_experts", "num_local_experts"), router="sigmoid",
    ),
    "gpt_oss": DecoderStyle(
        norm=layers.olmo_norm, qkv_bias=(True, "attention_bias"), out_bias=(True, "attention_bias"), turning="paired",
        eager="sinks", experts=("num_local_experts", "num_experts"), router="chosen",
    ),
}  # fmt: skip


#: Families whose layers are of two kinds: every so many has attention to the whole row, the others a sliding window.
_FULL_EVERY = {"gemma3_text": 6, "cohere2": 4, "olmo3": 4}

#: Families that compute rotary embeddings in FP32, and cast the result back.
_FULL_TURNS = ("cohere", "cohere2", "ernie4_5")

#: Families whose cosines and sines stay in FP32.
_FULL_COSINES = ("olmo2", "olmo3", "ernie4_5")


class Decoder:
    """A decoder of one of the styles. masked: attention has a mask, so keys and values are repeated for each head."""

    def __init__(
        self, tape: Tape, config: ModelConfig, batch: Batch, style: DecoderStyle, *, masked: bool = False
    ) -> None:
        self.tape, self.config, self.batch, self.style, self.masked = tape, config, batch, style, masked
        self.hidden = config.size("hidden_size")
        self.heads = config.size("num_attention_heads")
        self.groups = config.size("num_key_value_heads", default=self.heads)
        self.head = config.size(
            "head_dim", default=128 if config.architecture == "qwen3" else self.hidden // self.heads
        )
        self.act = config.word("hidden_act", "hidden_activation", default=style.act)
        if self.heads % self.groups:
            raise ConfigError(
                f"{config.path}: `num_attention_heads` is {self.heads}, which is no multiple of `num_key_value_heads`, "
                f"{self.groups}"
            )
        share = config.share("partial_rotary_factor", default=style.rotary)
        if (rope := config.part("rope_parameters")) and "partial_rotary_factor" in rope:
            share = ModelConfig(rope, f"{config.path} (rope_parameters)").share("partial_rotary_factor", default=share)
        if not 0 <= share <= 1:
            raise ConfigError(f"{config.path}: `partial_rotary_factor` is {share}; a number from 0 to 1 is needed")
        self.rotary = int(self.head * share) / self.head
        if style.latent:
            self.head, self.rotary = config.size("qk_rope_head_dim"), 1.0

    def run(self, images: Value | None = None) -> Value:
        """Run the model and its loss, and return the loss. images: rows that stand at the place of some tokens."""
        tape, config, batch, hidden = self.tape, self.config, self.batch, self.hidden
        words = config.size("vocab_size")
        count = config.blocks("num_hidden_layers")
        x = tape.embedding(tape.constant(batch.tokens, INDEX, "input"), "embed_tokens", words, hidden)
        if "embedding" in self.style.scaled:
            x = tape.pointwise(x, "mul", "")
        if images is not None:
            x = tape.placed(x, tape.cast(images, x.width), batch.tokens)
        width = FULL if config.architecture in _FULL_COSINES else x.width
        turned = int(self.head * self.rotary) // (2 if config.architecture == "gpt_oss" else 1)
        rows = batch.tokens if self.style.turning == "rows" else batch.length
        turns = [[tape.constant(rows * turned, width) for _ in range(2)]
                 for _ in range(2)]  # fmt: skip
        for number in range(count):
            with tape.block(f"layers.{number}"):
                x = self._layer(x, turns[self._local(number)] if self._turns(number) else [], number)
        x = tape.head(self.style.norm(tape, x, self.style.final_norm, hidden))
        return self._loss(x, words)

    def _turns(self, number: int) -> bool:
        """True if a layer has rotary embeddings: in SmolLM3 every fourth one has none."""
        if self.style.turned != "listed":
            return self.style.turned == "all" or self._local(number)
        listed = self.config.numbers("no_rope_layers")
        return (
            bool(listed[number])
            if listed
            else (number + 1) % self.config.size("no_rope_layer_interval", default=4) != 0
        )

    def _local(self, number: int) -> bool:
        """True if a layer has other rotary embeddings: those with a sliding window, all but every so many."""
        every = _FULL_EVERY.get(self.config.architecture)
        if every is None:
            return False
        kinds = self.config.values.get("layer_types")
        if isinstance(kinds, list) and number < len(kinds):
            return bool(kinds[number] == "sliding_attention")
        return (number + 1) % self.config.size("sliding_window_pattern", default=every) != 0

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
        if self.config.share("final_logit_softcapping"):
            logits = tape.pointwise(tape.pointwise(tape.pointwise(logits, "div", ""), "tanh", "output"), "mul", "")
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

    def _latent_attention(self, x: Value, turns: list[Value]) -> Value:
        """Attention whose keys and values are made of a narrow matmul, with a common part that has positions."""
        tape, config, hidden, heads, tokens = self.tape, self.config, self.hidden, self.heads, self.batch.tokens
        plain, turned = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim")
        narrow, value = config.size("kv_lora_rank"), config.size("v_head_dim")
        wide, bias, style = plain + turned, self._biased(self.style.qkv_bias), self.style
        if config.has("q_lora_rank"):
            rank = config.size("q_lora_rank")
            q = style.norm(tape, tape.linear(x, "q_a_proj", hidden, rank, bias), "q_a_layernorm", rank)
            q = tape.linear(q, "q_b_proj", rank, heads * wide)
        else:
            q = tape.linear(x, "q_proj", hidden, heads * wide)
        both = tape.linear(x, "kv_a_proj_with_mqa", hidden, narrow + turned, bias)
        kv = style.norm(tape, tape.part(both, tokens * narrow), "kv_a_layernorm", narrow)
        q_turned, k_turned = self._turned(
            tape.part(q, tokens * heads * turned), tape.part(both, tokens * turned), turns
        )
        q = tape.joined([tape.part(q, tokens * heads * plain), q_turned])
        kv = tape.linear(kv, "kv_b_proj", narrow, heads * (plain + value))
        v = tape.part(kv, tokens * heads * value)
        k = tape.joined([tape.part(kv, tokens * heads * plain), k_turned])
        k.resize(q.count)
        y = tape.copy(tape.attention(q, k, v, heads * tokens))
        y.resize(v.count)
        return tape.linear(y, "o_proj", heads * value, hidden, bias)

    def _attention(self, x: Value, turns: list[Value]) -> Value:
        if self.style.latent:
            return self._latent_attention(x, turns)
        tape, style, hidden = self.tape, self.style, self.hidden
        wide, narrow = self.heads * self.head, self.groups * self.head
        if style.fused == "all":
            qkv = tape.linear(x, "qkv_proj", hidden, wide + 2 * narrow)
            q, k, v = (tape.part(qkv, self.batch.tokens * width) for width in (wide, narrow, narrow))
        else:
            bias = self._biased(style.qkv_bias)
            q = tape.linear(x, "q_proj", hidden, wide, bias)
            k = tape.linear(x, "k_proj", hidden, narrow, bias)
            v = tape.linear(x, "v_proj", hidden, narrow, bias)
        q, k = self._normed(q, k)
        if turns:
            q, k = self._turned(q, k, turns)
        if "queries" in style.scaled:
            q = tape.mul(q, tape.constant(self.batch.length, q.width))
        rows = self.heads * self.batch.tokens
        if style.eager:
            cap, sinks = style.eager == "cap" and self.config.share("attn_logit_softcapping") > 0, None
            if style.eager == "sinks":
                sinks = tape.parameter("sinks", (self.heads,))
            y = tape.eager_attention(q, k, v, rows, self.batch.length, cap=cap, sinks=sinks)
        else:
            y = self._fused_attention(q, k, v, rows)
        if style.joins:
            y = tape.copy(y)
        return tape.linear(y, "o_proj", wide, hidden, self._biased(style.out_bias))

    def _fused_attention(self, q: Value, k: Value, v: Value, rows: int) -> Value:
        tape = self.tape
        if not self.masked:
            return tape.attention(q, k, v, rows)
        if self.groups < self.heads:
            k, v = (tape.repeated(each, self.heads // self.groups) for each in (k, v))
        mask = tape.constant(self.batch.tokens * self.batch.length, tape.precision.compute)
        return tape.attention(q, k, v, rows, mask)

    def _turned(self, q: Value, k: Value, turns: list[Value]) -> tuple[Value, Value]:
        """Return queries and keys with rotary embeddings."""
        tape, kind, widths = self.tape, self.style.turning, (q.width, k.width)
        if kind == "repeated":  # each layer spreads the half of cosines and sines for its own
            turns = [tape.constant(each.count, each.width) for each in turns]
        if self.config.architecture in _FULL_TURNS:
            q, k = (tape.cast(each, FULL) for each in (q, k))
        if kind == "paired":
            q, k = (layers.paired_rotary(tape, each, turns[0], turns[1]) for each in (q, k))
        else:
            q, k = (layers.partial_rotary(tape, each, self.rotary, turns[0], turns[1]) for each in (q, k))
        if self.config.architecture in (*_FULL_TURNS, "olmo2", "olmo3"):  # turned in FP32, and cast back
            q, k = (tape.cast(each, width) for each, width in zip((q, k), widths, strict=True))
        return q, k

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
        if number < self.config.count("first_k_dense_replace"):
            return False
        return number not in self.config.numbers("mlp_only_layers") and (number + 1) % step == 0

    def _experts(self, x: Value) -> Value:
        """Experts by grouped matmuls: each token is copied for each of its experts. mpguard lowers their inputs."""
        tape, config, hidden, tokens = self.tape, self.config, self.hidden, self.batch.tokens
        number = config.size(*self.style.experts)
        width = config.size("moe_intermediate_size", "intermediate_size")
        chosen = tokens * config.size("num_experts_per_tok")
        weights = self._routed(x, number, chosen)
        weights = tape.gathered(weights, chosen, chosen)
        mixed = self.style.router == "chosen"  # as GPT-OSS has them
        more = {"transposed": mixed, "bias": mixed}
        rows = tape.gathered(x, chosen * hidden, chosen)
        both = tape.expert_product(rows, "gate_up_proj", (number, 2 * width, hidden), **more)
        gate, up = (tape.part(both, both.count // 2) for _ in range(2))
        y = self._clamped_gate(gate, up) if mixed else tape.mul(layers.activation(tape, gate, self.act), up)
        y = tape.expert_product(y, "down_proj", (number, hidden, width), **more)
        y = tape.gathered(tape.mul(y, weights), chosen * hidden, chosen)
        y = tape.cast(tape.mean(y, tokens * hidden), x.width)
        if shared_count := config.count("n_shared_experts"):
            return tape.add(y, self._dense(x, "mlp.shared_experts", width * shared_count))
        if config.architecture != "qwen2_moe":
            return y
        shared = self._dense(x, "mlp.shared_expert", config.size("shared_expert_intermediate_size"))
        gate = tape.pointwise(tape.linear(x, "mlp.shared_expert_gate", hidden, 1), "sigmoid", "output")
        return tape.add(y, tape.mul(gate, shared))

    def _clamped_gate(self, gate: Value, up: Value) -> Value:
        """Return `(up + 1) * gate * sigmoid(alpha * gate)`, both clamped."""
        tape = self.tape
        gate, up = (tape.pointwise(each, "clamp") for each in (gate, up))
        y = tape.mul(gate, tape.pointwise(tape.pointwise(gate, "mul", ""), "sigmoid", "output"))
        return tape.mul(tape.pointwise(up, "add", ""), y)

    def _routed(self, x: Value, number: int, chosen: int) -> Value:
        """Return the weights of the chosen experts."""
        tape, config, tokens, kind = self.tape, self.config, self.batch.tokens, self.style.router
        table = tape.parameter("mlp.gate.weight", (number, self.hidden), "linear")
        if kind == "chosen":
            bias = [tape.parameter("mlp.gate.bias", (number,))]
            logits = tape.product(x, table, tokens * number, bias)
            return tape.softmax(tape.gathered(logits, chosen, chosen), logits.width)
        if kind == "sigmoid":
            tape.buffer("mlp.gate.e_score_correction_bias", number)
            logits = tape.product(x, table, tokens * number, width=FULL)
            weights = tape.gathered(tape.pointwise(logits, "sigmoid", "output"), chosen, chosen)
        else:
            logits = tape.product(x, table, tokens * number)
            weights = tape.gathered(tape.softmax(logits, FULL), chosen, chosen)
        if config.flag("norm_topk_prob", config.architecture == "mixtral" or kind == "sigmoid"):
            weights = tape.mul(weights, tape.pointwise(tape.mean(weights, tokens), "reciprocal", "output"))
        return tape.pointwise(weights, "mul", "") if kind == "sigmoid" else tape.cast(weights, logits.width)


def run(tape: Tape, config: ModelConfig, batch: Batch) -> Value:
    """Run a decoder whose family is in `STYLES`."""
    return Decoder(tape, config, batch, STYLES[config.architecture]).run()
