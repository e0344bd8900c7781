from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Bad, Diagnostic, Facts, Good, Rule, any_of, backends, lazy_pattern

#: Code that sets the precision of matrix products elsewhere, or makes FP32 products rare.
_SETS_PRECISION = lazy_pattern(
    r"(?i)autocast|float16|\bhalf\b|\.half\(|fp16|bf16|\bamp\b|tf32|fp32_precision|matmul_precision|accelerat|deepspeed"
    r"|trainer|lightning|fabric|precision"
)


class Tf32Off(Rule):
    """A script trains in FP32 on CUDA and sets no TF32 switch.

    ## What it does
    Reports the first optimizer step of a script that moves its model to CUDA, trains it in FP32 and sets none of
    torch's TF32 switches.

    ## Why is this bad
    torch leaves TF32 off for matrix products (since 1.12). On Ampere and newer GPUs
    `torch.set_float32_matmul_precision("high")` runs FP32 products on tensor cores with 11 significant bits, which is
    enough for most training. NVIDIA's data sheet of the A100 gives 156 TFLOPS for TF32 and 19.5 for FP32.

    ## Known limits
    Preview: the code does not show whether the GPU has TF32 and whether the program tolerates the lost bits. Not
    reported if the file mentions any low precision or a framework that sets it.
    """

    code, name = "MPG702", "tf32-off"
    severity = "info"
    preview = True
    message = "FP32 training on CUDA with TF32 off: `torch.set_float32_matmul_precision` is never called"
    help = 'call `torch.set_float32_matmul_precision("high")`, unless every bit of FP32 is needed'
    triggers = (
        any_of(b".cuda()", b'"cuda"', b"'cuda'", b'"cuda:', b"'cuda:"),
        any_of(b".backward("),
        any_of(b".step("),
    )
    examples = (
        Bad(
            """\
import torch

def main(loader):
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        model(x.cuda()).sum().backward()
        optimizer.step()  # !

if __name__ == "__main__":
    main([])
"""
        ),
        Good(
            """\
import torch

def main(loader):
    torch.set_float32_matmul_precision("high")
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        model(x.cuda()).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    main([])
"""
        ),
        Good(
            """\
import torch

def step(model, optimizer, x):
    model.to("cuda")(x).sum().backward()
    optimizer.step()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if "__main__" not in facts.file_text or _SETS_PRECISION.search(facts.file_text) or backends.switches(facts):
            return
        for step in facts.events("step")[:1]:
            if facts.events("backward"):
                yield self.at(step)
