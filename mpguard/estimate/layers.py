"""Parts that model families share, written operator by operator as transformers 5.23 runs them."""

from __future__ import annotations

from mpguard.estimate.tape import FULL, Tape, Value


def rms_norm(tape: Tape, x: Value, name: str, width: int) -> Value:
    """`LlamaRMSNorm`: normalized in FP32, multiplied with the weight in the dtype of the input."""
    weight, dtype = tape.parameter(f"{name}.weight", (width,)), x.width
    x = _normalized(tape, tape.cast(x, FULL), width)
    return tape.mul(weight, tape.cast(x, dtype))


def gemma_norm(tape: Tape, x: Value, name: str, width: int) -> Value:
    """`GemmaRMSNorm`: multiplied with `1 + weight` in FP32."""
    weight, dtype = tape.parameter(f"{name}.weight", (width,)), x.width
    scale = tape.pointwise(tape.cast(weight, FULL), "add", "")
    return tape.cast(tape.mul(_normalized(tape, tape.cast(x, FULL), width), scale), dtype)


def olmo_norm(tape: Tape, x: Value, name: str, width: int) -> Value:
    """`Olmo2RMSNorm`: multiplied with the weight in FP32."""
    weight, dtype = tape.parameter(f"{name}.weight", (width,)), x.width
    return tape.cast(tape.mul(weight, _normalized(tape, tape.cast(x, FULL), width)), dtype)


def cohere_norm(tape: Tape, x: Value, name: str, width: int) -> Value:
    """`CohereLayerNorm`: a layer norm without bias in FP32, written out; the mean is subtracted twice."""
    weight, dtype = tape.parameter(f"{name}.weight", (width,)), x.width
    x = tape.cast(x, FULL)
    mean = tape.mean(x, x.count // width)
    variance = tape.mean(tape.pointwise(tape.add(x, mean), "pow"), x.count // width)
    y = tape.mul(tape.add(x, mean), tape.rsqrt(variance))
    return tape.cast(tape.mul(tape.cast(weight, FULL), y), dtype)


def _normalized(tape: Tape, x: Value, width: int) -> Value:
    return tape.mul(x, tape.rsqrt(tape.mean(tape.pointwise(x, "pow"), x.count // width)))


def rotary(tape: Tape, x: Value, cos: Value, sin: Value) -> Value:
    """`apply_rotary_pos_emb` of queries or keys."""
    turned = tape.copy(x)
    return tape.add(tape.mul(x, cos), tape.mul(turned, sin))


def paired_rotary(tape: Tape, x: Value, cos: Value, sin: Value) -> Value:
    """Rotary embedding of two halves, each multiplied with cosines and sines, and joined again."""
    first, second = (tape.part(x, x.count // 2) for _ in range(2))
    return tape.joined([tape.add(tape.mul(a, cos), tape.mul(b, sin)) for a, b in ((first, second), (second, first))])


def partial_rotary(tape: Tape, x: Value, share: float, cos: Value, sin: Value) -> Value:
    """Rotary embedding of the first part of each head; the rest is copied."""
    if share == 1:
        return rotary(tape, x, cos, sin)
    turned = rotary(tape, tape.part(x, int(x.count * share)), cos, sin)
    return tape.joined([turned, tape.part(x, x.count - turned.count)])


def activation(tape: Tape, x: Value, name: str) -> Value:
    """A function of `ACT2FN`."""
    if name in ("gelu_new", "gelu_fast"):
        wide = FULL if tape.precision.autocast and tape.precision.cuda else x.width
        cube = tape.pointwise(tape.pointwise(tape.cast(x, wide), "pow"), "mul", "")
        inner = tape.pointwise(tape.add(x, cube), "mul", "")
        tanh = tape.pointwise(inner, "tanh", "output")
        return tape.mul(tape.pointwise(x, "mul", ""), tape.pointwise(tanh, "add", ""))
    if name == "quick_gelu":
        return tape.mul(x, tape.pointwise(tape.pointwise(x, "mul", ""), "sigmoid", "output"))
    return tape.pointwise(x, name, "output" if name in ("relu", "tanh", "sigmoid") else "input")
