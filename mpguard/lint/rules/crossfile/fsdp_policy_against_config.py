from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Diagnostic, Dtype, Facts, Good, HasSpan, Rule, any_of, launch_expectations

_PLUGIN = "FullyShardedDataParallelPlugin"


class FsdpPolicyAgainstConfig(Rule):
    """The FSDP policy that the code passes to Accelerate computes in another dtype than `mixed_precision`.

    ## What it does
    Compares the `param_dtype` of `MixedPrecision` and `MixedPrecisionPolicy`, and accelerate's short
    `mixed_precision_policy="fp16"`, with the launch configs of a script that uses Accelerate.

    ## Why is this bad
    accelerate 1.15 never compares the two: the policy sets the dtype of the computation, `mixed_precision` everything
    else. A policy in FP16 with `mixed_precision: bf16` trains in FP16 with no GradScaler, and gradients below 6e-8 are
    lost; one in BF16 with `fp16` scales a loss that needs no scaling (observed).

    ## Known limits
    Only dtypes that are known are compared, and only in files that use Accelerate. Under a config with `no`, the policy
    is assumed to be intended.
    """

    code, name = "MPG864", "fsdp-policy-against-config"
    severity = "error"
    message = "the FSDP policy computes in {found}, the launch config has {wanted}"
    help = "leave the policy to the config, or use the same dtype in both"
    triggers = (any_of(b"MixedPrecision", b"mixed_precision_policy"), any_of(b"ccelerat"))
    needs_config = True
    examples = (
        Bad(
            """\
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecision

policy = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)  # !
plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
accelerator = Accelerator(fsdp_plugin=plugin)
""",
            files={"mp.yaml": "distributed_type: FSDP\nmixed_precision: bf16\n"},
        ),
        Good(
            """\
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

def main(args):
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    other = MixedPrecisionPolicy(param_dtype=args.dtype)
    third = MixedPrecision(param_dtype=torch.float16 if args.half else torch.bfloat16)
    fourth = FullyShardedDataParallelPlugin(mixed_precision_policy="bf16")
    return Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(mixed_precision_policy=policy))
""",
            files={"mp.yaml": "distributed_type: FSDP\nmixed_precision: fp8\n"},
        ),
    )  # fmt: skip

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        plugins = [call for call in facts.calls.get(_PLUGIN, ()) if facts.called_path(call).startswith("accelerate.")]
        configs = launch_expectations.configs(facts)
        if not configs or not (plugins or facts.events("accelerator")):
            return
        for policy in facts.events("policy"):
            dtype = launch_expectations.low(policy.dtypes)
            contradicts = (
                dtype is not None
                and launch_expectations.contradicts(dtype, configs)
                and launch_expectations.is_unconditional(policy.guard, policy.call)
            )
            if dtype is not None and contradicts and not facts.is_inference(policy.call):
                yield self._against(policy, dtype, configs)
        for call in plugins:
            given = call.argument(None, "mixed_precision_policy")
            short_form = launch_expectations.literal(facts.evaluate(given, call)) if given is not None else None
            dtype = launch_expectations.compute_dtype(short_form)
            if given is not None and dtype is not None and launch_expectations.contradicts(dtype, configs):
                yield self._against(facts.span(given, call), dtype, configs)

    def _against(
        self, place: HasSpan | tuple[int, int], dtype: Dtype, configs: launch_expectations.Configs
    ) -> Diagnostic:
        notes = launch_expectations.places(configs)
        return self.at(place, found=dtype.label, wanted=launch_expectations.wanted(configs), notes=notes)
