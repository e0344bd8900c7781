from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import Bad, Call, Diagnostic, Dtype, Facts, Good, Note, Rule, any_of, dotted


class PipelineCastsTrainedModel(Rule):
    """A pipeline for validation is cast to FP16, and with it the model that is being trained.

    ## What it does
    Reports `pipeline.to(dtype=torch.float16)` and `pipeline.half()` if the pipeline of diffusers was made with the
    model that `accelerator.prepare` returned (`unet=accelerator.unwrap_model(unet)`), in a loop that goes on training.

    ## Why is this bad
    `DiffusionPipeline.to` calls `module.to(device, dtype)` of each of its models, which casts in place, and
    `unwrap_model` returns the model itself, not a copy. After the first validation the trained weights are FP16: the
    next step raises "Attempting to unscale FP16 gradients", and what was below FP16's precision is lost. `torch_dtype=`
    of `from_pretrained` does not cast the models that are passed in.

    ## Known limits
    Not reported: copies (`copy.deepcopy(unet)`), BF16, and pipelines that are made in another function than the loop.
    """

    code, name = "MPG117", "pipeline-casts-trained-model"
    severity = "error"
    message = "`{cast}` casts `{model}` too, which goes on training with FP16 weights"
    help = "move the pipeline without a dtype, and validate under autocast; or cast the trained parameters back to FP32"
    triggers = (any_of(b"Pipeline"), any_of(b".prepare("), any_of(b"float16", b".half"))
    examples = (
        Bad(
            """\
import torch
from accelerate import Accelerator
from diffusers import StableDiffusionPipeline

def log_validation(pipeline, accelerator, dtype, prompt):
    pipeline = pipeline.to(accelerator.device, dtype=dtype)  # !
    return pipeline(prompt).images

def main(args, unet, optimizer, loader):
    accelerator = Accelerator(mixed_precision="fp16")
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    for epoch in range(args.epochs):
        for x in loader:
            accelerator.backward(unet(x).sample.mean())
            optimizer.step()
        pipeline = StableDiffusionPipeline.from_pretrained(args.name, unet=unet, torch_dtype=torch.float16)
        log_validation(pipeline, accelerator, torch.float16, args.prompt)
"""
        ),
        Good(
            """\
import torch
from accelerate import Accelerator
from diffusers import StableDiffusionPipeline

def log_validation(pipeline, accelerator, dtype, prompt):
    pipeline = pipeline.to(accelerator.device)
    return pipeline(prompt).images

def main(args, unet, optimizer, loader):
    accelerator = Accelerator(mixed_precision="fp16")
    unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
    for epoch in range(args.epochs):
        for x in loader:
            accelerator.backward(unet(x).sample.mean())
            optimizer.step()
        pipeline = StableDiffusionPipeline.from_pretrained(args.name, unet=accelerator.unwrap_model(unet), torch_dtype=torch.float16)
        log_validation(pipeline, accelerator, torch.float16, args.prompt)
"""  # noqa: E501
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        made = {
            call: model
            for name in ("from_pretrained", *(name for name in facts.calls if name.endswith("Pipeline")))
            for call in facts.calls.get(name, ())
            if "Pipeline" in dotted(call.func) and (model := self._trained(call, facts))
        }
        for cast in facts.events("cast") if made else ():
            if cast.may_be(Dtype.FP16) and cast.subject is not None and "." not in cast.key.removeprefix("self."):
                records = facts.flow.backward(cast.subject, cast.call) if facts.casts.is_module(cast) else ()
                for call in (each for each in records if isinstance(each, Call) and each in made):
                    notes = (Note("the pipeline has the trained model from here", call.span),)
                    yield self.at(cast, cast=facts.short(cast.call.node), model=made[call], notes=notes)
                    break

    def _trained(self, pipeline: Call, facts: Facts) -> str:
        """Return the name of a prepared model that a pipeline contains, if its loop goes on training; "" without."""
        casts = facts.events("cast")
        back = (each.call for each in casts if each.may_be(Dtype.FP32) and facts.casts.is_module(each))
        if any(_in_loop(pipeline, call) for call in (*facts.calls.get("cast_training_params", ()), *back)):
            return ""  # the trained parameters are cast back
        if not any(_in_loop(pipeline, event.call) for event in facts.events("framework")):
            return ""
        prepared = {event.call for event in facts.events("prepare")}
        for given in pipeline.keywords.values():
            inner = given
            while isinstance(inner, cst.Call) and dotted(inner.func).endswith("unwrap_model") and inner.args:
                inner = inner.args[0].value
            bindings = facts.bindings(inner.value, pipeline) if isinstance(inner, cst.Name) else []
            if any(facts.call_of(each.value) in prepared for each in bindings):
                return dotted(inner)
        return ""


def _in_loop(pipeline: Call, call: Call) -> bool:
    """True if a loop around the pipeline has a call too."""
    return call.scope is pipeline.scope and any(loop in call.loops for loop in pipeline.loops)
