from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import (
    HALF_DTYPES,
    Bad,
    Call,
    Constant,
    Diagnostic,
    Event,
    Facts,
    Good,
    Note,
    Object,
    Rule,
    any_of,
    compatible,
    constant,
    dotted,
    dtype_triggers,
    lazy_pattern,
)

#: Models of transformers whose only buffers are the frequencies of their rotary embeddings.
_FAMILY = (
    r"(?:llama|mistral|mixtral|qwen2|qwen2_5|qwen3|gemma|gemma2|phi3|olmo|olmo2|stablelm|starcoder2|granite|cohere)"
)
_ROTARY = lazy_pattern(rf"(?i)^transformers\.(?:models\.\w+\.\w+\.)?{_FAMILY}(?:Moe)?(?:Model|For\w+)\b")
_AUTO = lazy_pattern(r"^transformers\.(?:models\.\w+\.\w+\.)?AutoModelForCausalLM\b")
#: Names in the Hub of models of these families.
_NAMES = lazy_pattern(r"(?i)(?:^|/)(?:meta-)?(?:llama-[23]|mistral-|mixtral-|qwen2|qwen3|gemma-|phi-3|olmo-|vicuna-)")

_PRODUCTS = ("einsum", "outer", "ger")


class RotaryFrequenciesCast(Rule):
    """A cast of a whole Llama-like model also rounds the frequencies of its rotary embedding.

    ## What it does
    Reports `model.to(torch.bfloat16)`, `.bfloat16()` and `.half()` of a model of transformers with rotary embeddings:
    `LlamaForCausalLM` and its like, or `AutoModelForCausalLM` with the name of such a model. Also reports an own rotary
    embedding that casts the positions to the dtype of its buffer `inv_freq`, and casts to FP32 only their product.

    ## Why is this bad
    `inv_freq` is a buffer. `from_pretrained(..., dtype=torch.bfloat16)` keeps it in FP32, a cast of the module does
    not, and a later `.float()` cannot restore it. The angle is the frequency times the position: at position 4096 the
    cosines of a Llama differ by up to 0.7 in BF16 (tried with transformers 5.23). True since transformers 4.38: before,
    the tables of the default length were computed ahead of the cast.

    ## Known limits
    A DeepSpeed that casts parameters only (0.19 does) leaves the buffer of an own embedding in FP32. Of models of
    transformers nothing is reported in a file that mentions `inv_freq`, nor in one that only converts and saves: the
    frequencies are not saved. Nor for models of other classes, and `AutoModel` classes whose checkpoint is no
    literal.
    """

    code, name = "MPG616", "rotary-frequencies-cast"
    severity = "warning"
    preview = True
    message = "`{expr}` also rounds `inv_freq` of the rotary embeddings to {dtype}: positions get wrong angles"
    _late = "the angles are cast to FP32 after the product, which a 16-bit model computes with 16-bit positions"
    _late_help = "cast the positions and `inv_freq` to float32 before they are multiplied"
    help = "load with `from_pretrained(..., dtype={dtype_name})`, which keeps `inv_freq` in float32"
    versions = {"transformers": ">=4.38"}
    triggers = (
        any_of(*dtype_triggers.CASTS_LOW_PRECISION, b".float()"),
        any_of(b"from_pretrained", b"from_config", b"inv_freq"),
    )
    pattern = lazy_pattern(
        rb"(?i)"
        + _FAMILY.encode()
        + rb"(?:Moe)?(?:Model|For[A-Z])|AutoModelForCausalLM|(?:type_as\(|to\()self\.inv_freq"
    )
    examples = (
        Bad(
            """\\
import torch
from transformers import LlamaForCausalLM

model = LlamaForCausalLM.from_pretrained("meta-llama/Llama-2-7b-hf")
model.to(torch.bfloat16)  # !
"""
        ),
        Good(
            """\
import torch

class Autocast(torch.nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, x):
        t = torch.arange(x.shape[1], device=x.device).type_as(self.inv_freq)
        freqs = torch.outer(t, self.inv_freq)
        return freqs.cos().bfloat16(), freqs.sin().bfloat16()

class Before(Autocast):
    def __init__(self, dim):
        super().__init__(dim)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, x):
        t = torch.arange(x.shape[1], device=x.device).float()
        freqs = torch.outer(t, self.inv_freq.float())
        return freqs.float().cos()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        yield from self._too_late(facts)
        converts = "save_pretrained" in facts.calls and not (facts.any_training or "generate" in facts.calls)
        if converts or "inv_freq" in facts.file_text:
            return
        for cast in facts.events("cast"):
            low = [dtype for dtype in HALF_DTYPES if any(compatible(g, cast.guard) for g in cast.may_be(dtype))]
            if low and self._is_rotary(cast, facts):
                help = self.help.format(dtype_name=f"torch.{low[0].torch_name}")
                yield self.at(cast, expr=facts.short(cast.call.node), dtype=low[0].label, help=help)

    def _too_late(self, facts: Facts) -> Iterator[Diagnostic]:
        """Yield the casts to FP32 of a product that is computed in the dtype of a buffer of frequencies."""
        buffers = {
            (call.scope.owner, f"self.{name[0]}")
            for call in facts.calls.get("register_buffer", ())
            if (name := constant(call.argument(0, "name"))) is not None and name[0] == "inv_freq"
        }
        for call in facts.calls.get("float", ()) if buffers else ():
            if call.receiver is None or call.node.args:
                continue
            before = [each for each in facts.flow.backward(call.receiver, call) if isinstance(each, Call)]
            for product in before:
                used = [dotted(each) for each in product.positional]
                found = [key for key in used if (call.scope.owner, key) in buffers]
                if product.name not in _PRODUCTS or not found:
                    continue
                given = (records for each in product.positional for records in facts.flow.backward(each, product))
                if any(isinstance(each, Call) and self._follows(each, found[0]) for each in given):
                    notes = (Note("computed here in the dtype of the buffer", product.span),)
                    yield self.at(call, message=self._late, help=self._late_help, notes=notes)
                    break

    def _follows(self, call: Call, key: str) -> bool:
        """True if a call casts to the dtype of a buffer: `t.type_as(self.inv_freq)`, `t.to(self.inv_freq.dtype)`."""
        given = [dotted(each) for each in call.positional]
        return (call.name == "type_as" and key in given) or (call.name == "to" and f"{key}.dtype" in given)

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
