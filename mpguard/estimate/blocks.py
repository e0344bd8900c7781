"""Parts with several layers that the programs of model families share."""

from __future__ import annotations

import dataclasses

from mpguard.estimate import layers
from mpguard.estimate.tape import INDEX, Tape, Value


@dataclasses.dataclass(frozen=True)
class Batch:
    """The inputs of a step. patches: of an image, for models that take images of any size."""

    size: int
    length: int
    patches: int = 1024

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.size * self.length


def token_ids(tape: Tape, tokens: int) -> Value:
    return tape.constant(tokens, INDEX, "input")


@dataclasses.dataclass(frozen=True)
class Heads:
    """Attention with a matmul each for queries, keys, values and the result, whose names are given.

    scaled: queries are multiplied by a number. key_bias: keys have a bias if the others have; without one, in Whisper,
    the result is laid out as copied queries are, and copied too.
    """

    names: tuple[str, str, str, str]
    hidden: int
    count: int
    bias: bool = True
    dropout: float = 0.0
    scaled: bool = False
    key_bias: bool = True

    def __call__(self, tape: Tape, x: Value, other: Value) -> Value:
        """Run it. other: what keys and values are made of."""
        q = tape.linear(x, self.names[0], self.hidden, self.hidden, self.bias)
        q = tape.pointwise(q, "mul", "") if self.scaled else q
        k = tape.linear(other, self.names[1], self.hidden, self.hidden, self.bias and self.key_bias)
        v = tape.linear(other, self.names[2], self.hidden, self.hidden, self.bias)
        y = tape.attention(q, k, v, self.count * (x.count // self.hidden))
        y = y if self.key_bias else tape.copy(y)
        return tape.dropout(
            tape.linear(y, self.names[3], self.hidden, self.hidden, self.bias or not self.scaled), self.dropout
        )


def mlp(tape: Tape, x: Value, names: tuple[str, str], sizes: tuple[int, int, str], bias: bool = True) -> Value:
    hidden, inner, act = sizes
    y = layers.activation(tape, tape.linear(x, names[0], hidden, inner, bias), act)
    return tape.linear(y, names[1], inner, hidden, bias)


def tied_head(tape: Tape, x: Value, name: str, sizes: tuple[int, int], rows: int) -> Value:
    """The matmul with the embedding, whose sizes are given, and the loss in FP32."""
    logits = tape.product(x, tape.parameter(name, sizes, "embedding"), rows * sizes[0])
    return tape.cross_entropy(logits, rows, full=True)
