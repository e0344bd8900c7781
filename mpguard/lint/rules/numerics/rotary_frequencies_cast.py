from __future__ import annotations

import re
from collections.abc import Iterator

from mpguard.lint import (
    CASTS_LOW_PRECISION,
    HALF_DTYPES,
    Bad,
    Constant,
    Diagnostic,
    Event,
    Facts,
    Good,
    Object,
    Rule,
    any_of,
    compatible,
)

#: Models of transformers whose only buffers are the frequencies of their rotary embeddings.
_FAMILY = (
    r"(?:llama|mistral|mixtral|qwen2|qwen2_5|qwen3|gemma|gemma2|phi3|olmo|olmo2|stablelm|starcoder2|granite|cohere)"
)
_ROTARY = re.compile(rf"(?i)^transformers\.(?:models\.\w+\.\w+\.)?{_FAMILY}(?:Moe)?(?:Model|For\w+)\b")
_AUTO = re.compile(r"^transformers\.(?:models\.\w+\.\w+\.)?AutoModelForCausalLM\b")
#: Names in the Hub of models of these families.
_NAMES = re.compile(r"(?i)(?:^|/)(?:meta-)?(?:llama-[23]|mistral-|mixtral-|qwen2|qwen3|gemma-|phi-3|olmo-|vicuna-)")


class RotaryFrequenciesCast(Rule):
    """A cast of a whole Llama-like model also rounds the frequencies of its rotary embedding.

    ## What it does
    Reports `model.to(torch.bfloat16)`, `.bfloat16()` and `.half()` of a model of transformers with rotary embeddings:
    `LlamaForCausalLM` and its like, or `AutoModelForCausalLM` with the name of such a model.

    ## Why is this bad
    `inv_freq` is a buffer. `from_pretrained(..., dtype=torch.bfloat16)` keeps it in FP32, a cast of the module does
    not, and a later `.float()` cannot restore it. The angle is the frequency times the position: at position 4096 the
    cosines of a Llama differ by up to 0.7 in BF16 (tried with transformers 5.23). True since transformers 4.38: before,
    the tables of the default length were computed ahead of the cast.

    ## Known limits
    Nothing is reported in a file that mentions `inv_freq`, nor in one that only converts and saves: the frequencies
    are not saved. Nor for models of other classes, and `AutoModel` classes
    whose checkpoint is no literal.
    """

    code, name = "MPG616", "rotary-frequencies-cast"
    severity = "warning"
    message = "`{expr}` also rounds `inv_freq` of the rotary embeddings to {dtype}: positions get wrong angles"
    help = "load with `from_pretrained(..., dtype={dtype_name})`, which keeps `inv_freq` in float32"
    versions = {"transformers": ">=4.38"}
    triggers = (any_of(*CASTS_LOW_PRECISION), any_of(b"from_pretrained", b"from_config"), any_of(b"transformers"))
    pattern = re.compile(rb"(?i)" + _FAMILY.encode() + rb"(?:Moe)?(?:Model|For[A-Z])|AutoModelForCausalLM")
    examples = (
        Bad(
            """\\
import torch
from transformers import LlamaForCausalLM

model = LlamaForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf")
model.to(torch.bfloat16)  # !
"""
        ),
        Bad(
            """\\
import torch
from transformers import AutoModelForCausalLM, MistralForCausalLM

NAME = "Qwen/Qwen2.5-7B"

def load(path, half):
    model = MistralForCausalLM.from_pretrained(path, torch_dtype=torch.float16)
    if half:
        model = model.half().cuda()  # !
    return model

other = AutoModelForCausalLM.from_pretrained(NAME).to("cuda", dtype=torch.bfloat16)  # !
"""
        ),
        Good(
            """\\
import torch
from transformers import AutoModelForCausalLM, BertModel, GPT2LMHeadModel, LlamaForCausalLM

one = LlamaForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf", torch_dtype=torch.bfloat16).to("cuda")
two = AutoModelForCausalLM.from_pretrained("gpt2").half()
three = AutoModelForCausalLM.from_pretrained(path).half()
four = GPT2LMHeadModel.from_pretrained("gpt2").bfloat16()
five = BertModel.from_pretrained("bert-base-uncased").half()
six = LlamaForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf").to(torch.float32)
head = LlamaForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf")
head.lm_head.to(torch.bfloat16)
"""
        ),
        Good(
            """\\
import torch
from transformers import LlamaForCausalLM

model = LlamaForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf")
kept = model.model.rotary_emb.inv_freq.clone()
model.to(torch.bfloat16)
model.model.rotary_emb.inv_freq = kept
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        converts = "save_pretrained" in facts.calls and not (facts.any_training or "generate" in facts.calls)
        if converts or "inv_freq" in facts.file_text:
            return
        for cast in facts.events("cast"):
            low = [dtype for dtype in HALF_DTYPES if any(compatible(g, cast.guard) for g in cast.may_be(dtype))]
            if low and self._is_rotary(cast, facts):
                help = self.help.format(dtype_name=f"torch.{low[0].torch_name}")
                yield self.at(cast, expr=facts.short(cast.call.node), dtype=low[0].label, help=help)

    def _is_rotary(self, cast: Event, facts: Facts) -> bool:
        """True if what is cast is a model with rotary embeddings, under the conditions of the cast."""
        made = [each.atom for each in facts.evaluate(cast.subject, cast.call) if compatible(each.guard, cast.guard)]
        return bool(made) and all(isinstance(atom, Object) and self._has_frequencies(atom, facts) for atom in made)

    def _has_frequencies(self, atom: Object, facts: Facts) -> bool:
        if atom.call is None or _AUTO.match(atom.path) is None:
            return _ROTARY.match(atom.path) is not None
        given = facts.evaluate(atom.call.argument(0, "pretrained_model_name_or_path"), atom.call)
        return bool(given) and all(
            isinstance(each.atom, Constant) and _NAMES.search(str(each.atom.value)) for each in given
        )
