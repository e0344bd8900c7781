"""Models that are no LLaMA with changes, and like no other here: GPT-2, GPT-NeoX, OPT, DistilBERT, T5."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mpguard.estimate import layers
from mpguard.estimate.blocks import Batch, Heads, mlp, tied_head, token_ids
from mpguard.estimate.reading import ModelConfig
from mpguard.estimate.tape import FULL, INDEX, Tape, Value


def gpt2(tape: Tape, config: ModelConfig, batch: Batch) -> Value:
    hidden, words = config.size("n_embd", "hidden_size"), config.size("vocab_size")
    inner = config.size("n_inner", default=4 * hidden)
    heads, act = config.size("n_head", "num_attention_heads"), config.word("activation_function", default="gelu_new")
    dropped = config.share("resid_pdrop", default=0.1)
    x = tape.embedding(token_ids(tape, batch.tokens), "wte", words, hidden)
    place = tape.embedding(tape.constant(batch.length, INDEX), "wpe", config.size("n_positions", default=1024), hidden)
    x = tape.dropout(tape.add(x, place), config.share("embd_pdrop", default=0.1))
    for number in range(config.blocks("n_layer", "num_hidden_layers")):
        with tape.block(f"h.{number}"):
            y = tape.layer_norm(x, "ln_1", hidden)
            qkv = _conv1d(tape, y, "attn.c_attn", hidden, 3 * hidden)
            q, k, v = (tape.part(qkv, qkv.count // 3) for _ in range(3))
            y = tape.attention(q, k, v, heads * batch.tokens)
            x = tape.add(tape.dropout(_conv1d(tape, y, "attn.c_proj", hidden, hidden), dropped), x)
            y = _conv1d(tape, tape.layer_norm(x, "ln_2", hidden), "mlp.c_fc", hidden, inner)
            y = _conv1d(tape, layers.activation(tape, y, act), "mlp.c_proj", inner, hidden)
            x = tape.add(x, tape.dropout(y, dropped))
    x = tape.head(tape.layer_norm(x, "ln_f", hidden))
    if not config.flag("tie_word_embeddings", True):
        return tape.cross_entropy(tape.linear(x, "lm_head", hidden, words), batch.tokens, full=True)
    return tied_head(tape, x, "wte", (words, hidden), batch.tokens)


def _conv1d(tape: Tape, x: Value, name: str, inputs: int, outputs: int) -> Value:
    """`Conv1D`: a Linear with a transposed weight."""
    weight = tape.parameter(f"{name}.weight", (inputs, outputs), "linear")
    return tape.product(x, weight, x.count // inputs * outputs, [tape.parameter(f"{name}.bias", (outputs,))])


def gpt_neox(tape: Tape, config: ModelConfig, batch: Batch) -> Value:
    hidden, words, inner = (config.size(key) for key in ("hidden_size", "vocab_size", "intermediate_size"))
    heads, act = config.size("num_attention_heads"), config.word("hidden_act", default="gelu")
    dropped, bias = config.share("hidden_dropout"), config.flag("attention_bias", True)
    share = config.part("rope_parameters").get("partial_rotary_factor", config.share("rotary_pct", default=0.25))
    share = int(hidden // heads * share) / (hidden // heads)
    x = tape.dropout(tape.embedding(token_ids(tape, batch.tokens), "embed_in", words, hidden), dropped)
    turns = [tape.constant(int(batch.length * hidden // heads * share), x.width) for _ in range(2)]
    for number in range(config.blocks("num_hidden_layers")):
        with tape.block(f"layers.{number}"):
            y = tape.linear(tape.layer_norm(x, "input_layernorm", hidden), "query_key_value", hidden, 3 * hidden, bias)
            q, k, v = (tape.part(y, y.count // 3) for _ in range(3))
            q, k = (layers.partial_rotary(tape, each, share, turns[0], turns[1]) for each in (q, k))
            y = tape.copy(tape.attention(q, k, v, heads * batch.tokens))  # laid out as the joined queries
            attended = tape.linear(y, "dense", hidden, hidden, bias)
            attended = tape.dropout(attended, dropped)
            parallel = config.flag("use_parallel_residual", True)
            x = x if parallel else tape.add(attended, x)
            y = tape.layer_norm(x, "post_attention_layernorm", hidden)
            y = tape.dropout(mlp(tape, y, ("dense_h_to_4h", "dense_4h_to_h"), (hidden, inner, act)), dropped)
            x = tape.add(tape.add(y, attended), x) if parallel else tape.add(y, x)
    x = tape.head(tape.layer_norm(x, "final_layer_norm", hidden))
    if config.flag("tie_word_embeddings", False):
        return tied_head(tape, x, "embed_in", (words, hidden), batch.tokens)
    logits = tape.linear(x, "lm_head", hidden, words)
    return tape.cross_entropy(logits, batch.tokens, full=True)


def opt(tape: Tape, config: ModelConfig, batch: Batch) -> Value:
    hidden, words, inner = config.size("hidden_size"), config.size("vocab_size"), config.size("ffn_dim")
    heads, act = config.size("num_attention_heads"), config.word("activation_function", default="relu")
    dropped, bias = config.share("dropout", default=0.1), config.flag("enable_bias", True)
    narrow, first = config.size("word_embed_proj_dim", default=hidden), config.flag("do_layer_norm_before", True)
    x = tape.embedding(token_ids(tape, batch.tokens), "embed_tokens", words, narrow)
    places = config.size("max_position_embeddings", default=2048) + 2
    place = tape.embedding(tape.constant(batch.tokens, INDEX), "embed_positions", places, hidden)
    x = tape.linear(x, "project_in", narrow, hidden) if narrow != hidden else x
    x = tape.add(x, place)
    for number in range(config.blocks("num_hidden_layers")):
        with tape.block(f"layers.{number}"):
            y = tape.layer_norm(x, "self_attn_layer_norm", hidden) if first else x
            names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
            x = tape.add(x, Heads(names, hidden, heads, bias, dropped, True)(tape, y, y))
            x = x if first else tape.layer_norm(x, "self_attn_layer_norm", hidden)
            y = tape.layer_norm(x, "final_layer_norm", hidden) if first else x
            x = tape.add(x, tape.dropout(mlp(tape, y, ("fc1", "fc2"), (hidden, inner, act), bias), dropped))
            x = x if first else tape.layer_norm(x, "final_layer_norm", hidden)
    if first and not config.flag("_remove_final_layer_norm", False):
        x = tape.layer_norm(x, "final_layer_norm", hidden)
    x = tape.head(tape.linear(x, "project_out", hidden, narrow) if narrow != hidden else x)
    return tied_head(tape, x, "embed_tokens", (words, narrow), batch.tokens)


def distilbert(tape: Tape, config: ModelConfig, batch: Batch) -> Value:
    hidden, words, inner = config.size("dim"), config.size("vocab_size"), config.size("hidden_dim")
    heads, act = config.size("n_heads"), config.word("activation", default="gelu")
    dropped = config.share("dropout", default=0.1)
    names = ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin")
    x = tape.embedding(token_ids(tape, batch.tokens), "word_embeddings", words, hidden)
    places = config.size("max_position_embeddings", default=512)
    x = tape.add(x, tape.embedding(tape.constant(batch.length, INDEX), "position_embeddings", places, hidden))
    x = tape.dropout(tape.layer_norm(x, "embeddings.LayerNorm", hidden), dropped)
    for number in range(config.blocks("n_layers")):
        with tape.block(f"layer.{number}"):
            x = tape.layer_norm(tape.add(Heads(names, hidden, heads)(tape, x, x), x), "sa_layer_norm", hidden)
            y = tape.dropout(mlp(tape, x, ("ffn.lin1", "ffn.lin2"), (hidden, inner, act)), dropped)
            x = tape.layer_norm(tape.add(y, x), "output_layer_norm", hidden)
    x = layers.activation(tape, tape.linear(tape.head(x), "vocab_transform", hidden, hidden, True), act)
    x = tape.layer_norm(x, "vocab_layer_norm", hidden)
    table = tape.parameter("word_embeddings", (words, hidden), "embedding")
    logits = tape.product(x, table, batch.tokens * words, [tape.parameter("vocab_projector.bias", (words,))])
    return tape.cross_entropy(logits, batch.tokens)


def t5(tape: Tape, config: ModelConfig, batch: Batch) -> Value:
    """T5 1.0 and 1.1, both sides with rows of the given length."""
    hidden, words, inner = config.size("d_model"), config.size("vocab_size"), config.size("d_ff")
    heads, head = config.size("num_heads"), config.size("d_kv")
    kind, dropped = config.word("feed_forward_proj", default="relu"), config.share("dropout_rate", default=0.1)
    act = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    act, gated = config.word("dense_act_fn", default=act), config.flag("is_gated_act", kind.startswith("gated-"))
    length = batch.length

    def norm(x: Value, name: str) -> Value:
        weight = tape.parameter(f"{name}.weight", (hidden,))
        scale = tape.rsqrt(tape.mean(tape.pointwise(tape.cast(x, FULL), "pow"), x.count // hidden))
        return tape.mul(weight, tape.cast(tape.mul(x, scale), weight.width))

    def attended(x: Value, other: Value | None, name: str, bias: Value | None) -> Value:
        y = norm(x, f"{name}.layer_norm")
        source = y if other is None else other
        q = tape.linear(y, f"{name}.q", hidden, heads * head)
        k, v = (tape.linear(source, f"{name}.{each}", hidden, heads * head) for each in "kv")
        y = tape.attention(q, k, v, heads * batch.tokens, bias)
        return tape.add(x, tape.dropout(tape.linear(y, f"{name}.o", heads * head, hidden), dropped))

    def fed(x: Value, name: str) -> Value:
        y = norm(x, f"{name}.layer_norm")
        if gated:
            gate = layers.activation(tape, tape.linear(y, f"{name}.wi_0", hidden, inner), act)
            y = tape.mul(gate, tape.linear(y, f"{name}.wi_1", hidden, inner))
        else:
            y = layers.activation(tape, tape.linear(y, f"{name}.wi", hidden, inner), act)
        y = tape.cast(tape.dropout(y, dropped), tape.precision.weights)
        return tape.add(x, tape.dropout(tape.linear(y, f"{name}.wo", inner, hidden), dropped))

    def side(name: str, count: int, source: Value | None) -> Value:
        x = tape.dropout(tape.embedding(token_ids(tape, batch.tokens), "shared", words, hidden), dropped)
        bias: Value | None = None
        for number in range(count):
            with tape.block(f"{name}.block.{number}"):
                if bias is None:
                    buckets = config.size("relative_attention_num_buckets", default=32)
                    places = tape.constant(length * length, INDEX)
                    bias = tape.embedding(places, "relative_attention_bias", buckets, heads)
                x = attended(x, None, "self", bias)
                if source is not None:
                    x = attended(x, source, "cross", None)
                x = fed(x, "ff")
        return tape.dropout(norm(x, f"{name}.final_layer_norm"), dropped)

    layer_count = config.blocks("num_layers")
    source = side("encoder", layer_count, None)
    x = side("decoder", config.size("num_decoder_layers", default=layer_count), source)
    tape.returned.append(source)
    x = tape.head(x)
    if config.flag("tie_word_embeddings", True):  # transformers 5 ties them always: False means not to scale
        x = tape.pointwise(x, "mul", "")
    logits = tape.product(x, tape.parameter("shared", (words, hidden), "embedding"), batch.tokens * words)
    return tape.cross_entropy(logits, batch.tokens)


PROGRAMS: Mapping[str, Callable[[Tape, ModelConfig, Batch], Value]] = {
    "gpt2": gpt2, "gpt_neox": gpt_neox, "opt": opt, "distilbert": distilbert, "t5": t5, "mt5": t5,
}  # fmt: skip
