"""What rules say of axolotl's `bf16`, on the type that axolotl's schema gives it (axolotl is not installed here)."""

from __future__ import annotations

from typing import Literal

import pytest

from mpguard.document.schemas.axolotl import BF16_WORDS

pydantic = pytest.importorskip("pydantic")


@pytest.mark.parametrize("word", sorted(BF16_WORDS))
def test_words_that_the_schema_takes(word: str) -> None:
    adapter = pydantic.TypeAdapter(Literal["auto"] | bool | None)
    assert adapter.validate_python(word) in ("auto", True, False)


@pytest.mark.parametrize("word", ["full", "bf16", "mixed", ""])
def test_words_that_the_schema_refuses(word: str) -> None:
    assert word not in BF16_WORDS
    with pytest.raises(pydantic.ValidationError):
        pydantic.TypeAdapter(Literal["auto"] | bool | None).validate_python(word)


def test_trainer_refuses_both_modes() -> None:
    """The claim of MPG849 about `bfloat16` with `fp16`, observed: axolotl passes both to TrainingArguments."""
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="At most one of fp16 and bf16"):
        transformers.TrainingArguments(output_dir="unused", fp16=True, bf16=True, use_cpu=True)
