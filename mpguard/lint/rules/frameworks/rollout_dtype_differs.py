from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import HALF_DTYPES, Bad, Call, Diagnostic, Dtype, Facts, Good, Note, Rule, any_of, constant

#: Arguments of a Trainer that switch its precision, and what it then computes in.
_SWITCHES = {"fp16": Dtype.FP16, "bf16": Dtype.BF16}


class RolloutDtypeDiffers(Rule):
    """The engine that generates samples and the trainer that learns from them compute in different 16-bit formats.

    ## What it does
    Reports `vllm.LLM(dtype=...)` or `sglang.Engine(dtype=...)` with FP16 or BF16, in a program whose settings of a
    trainer (`GRPOConfig(fp16=True)`, `PPOConfig`, `TrainingArguments`), Accelerator or autocast have the other one.

    ## Why is this bad
    Reinforcement learning weighs each sample by a ratio: its probability for the trainer, divided by that for the
    generator. FP16 rounds to 11 bits and BF16 to 8, and over a long answer the differences add up: ratios are away from
    1 before anything was learned, and clipping throws samples away.

    ## Known limits
    Both must be known, and run in one program; a dtype of `"auto"` is that of the checkpoint, which is not known.
    """

    code, name = "MPG528", "rollout-dtype-differs"
    severity = "warning"
    message = "samples are generated in {generator}, and the trainer computes in {trainer}: their probabilities differ"
    help = "use one dtype for both"
    triggers = (any_of(b"vllm", b"sglang"), any_of(b"fp16", b"bf16", b"float16", b"half"))
    triggers_nearby = (
        any_of(b"fp16", b"bf16", b"float16"),
        any_of(b"Config(", b"Arguments(", b"Accelerator(", b"autocast("),
    )
    examples = (
        Bad(
            """\
from trl import GRPOConfig, GRPOTrainer
from vllm import LLM

generator = LLM("Qwen/Qwen2.5-1.5B", dtype="bfloat16")  # !
args = GRPOConfig("out", fp16=True, bf16=False)
GRPOTrainer(model="Qwen/Qwen2.5-1.5B", args=args, reward_funcs=reward).train()
"""
        ),
        Good(
            """\
from trl import GRPOConfig, GRPOTrainer
from vllm import LLM

generator = LLM("Qwen/Qwen2.5-1.5B", dtype="bfloat16")
judge = LLM("Qwen/Qwen2.5-7B", dtype="auto")
args = GRPOConfig("out", bf16=True)
GRPOTrainer(model="Qwen/Qwen2.5-1.5B", args=args, reward_funcs=reward).train()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        engines = [
            (call, dtype)
            for name in ("LLM", "Engine")
            for call in facts.calls.get(name, ())
            if (dtype := _dtype(call, facts))
        ]
        for call, generator in engines:
            program = dict.fromkeys(facts.of(each) for each in facts.programs_of(call.scope))
            trained = {dtype: made for each in (facts, *program) for dtype, made in _of_trainers(each)}
            other = next((each for each in HALF_DTYPES if each is not generator), None)
            if other in trained and generator not in trained:
                notes = (Note("the trainer's", trained[other].span, facts.elsewhere(trained[other])),)
                yield self.at(call, generator=generator.label, trainer=other.label, notes=notes)


def _dtype(engine: Call, facts: Facts) -> Dtype | None:
    """Return the 16-bit dtype that an engine of vLLM or SGLang is given; None if it is another, or not known."""
    if not facts.called_path(engine).startswith(("vllm.", "sglang.")):
        return None
    given = engine.argument(None, "dtype")
    if constant(given) == ("half",):
        return Dtype.FP16
    found = {dtype for _, dtype in facts.dtypes(given, engine, strings=True)} if given is not None else set()
    return next((each for each in HALF_DTYPES if found == {each}), None)


def _of_trainers(facts: Facts) -> Iterator[tuple[Dtype, Call]]:
    """Yield what trainers of the file compute in, and where that is set."""
    for name, calls in facts.calls.items():
        if name.endswith(("Config", "Arguments")):
            for call in calls:
                for field, dtype in _SWITCHES.items():
                    if constant(call.keywords.get(field)) == (True,):
                        yield dtype, call
    for call in facts.calls.get("Accelerator", ()):
        mode = constant(call.keywords.get("mixed_precision"))
        if mode is not None and mode[0] in _SWITCHES:
            yield _SWITCHES[mode[0]], call
    for event in facts.events("autocast"):
        for dtype in HALF_DTYPES:
            if event.may_be(dtype) and not facts.is_inference(event.call):
                yield dtype, event.call
