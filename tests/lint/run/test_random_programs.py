"""Whatever is in a file, the linter ends with findings, and what fixes make of it is a file that it can read."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from mpguard.lint.model.rule import rules
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target

RULES = rules(own_only=True)
#: Pieces that rules and readers care about; put together at random they are rarely code.
PIECES = (
    """
import torch~|from torch.cuda.amp import autocast~|model|.half()|.to(torch.float16)|loss|.backward()|optimizer.step()~
|scaler.scale(loss)|with torch.autocast('cuda', dtype=torch.float16):~|    |~|(|)|[|]|{|}|:|,|=|'|"|'''|#|\\|é
|# noqa: MPG101|# mpguard: ignore[MPG101]|# mpguard: ignore-file|if x:~|else:~|def f(x):~|return x~
|mixed_precision: fp8~|distributed_type: FSDP~|fp8_config:~|  amax_history_length: 16~|use_cpu: true~
|- |&a |*a|!!python/name:os.system |<<: |>~|{"bf16": {"enabled": true}}|"fp16"|true|16
""".replace("\n", "")
    .replace("~", "\n")
    .split("|")
)
TEXTS = st.lists(st.sampled_from([*PIECES, "\x00", "\ufeff", "\r\n", "\t", "|"]), max_size=40).map("".join)

#: Whole statements of a training step, in any order and any arms: mostly code.
STATEMENTS = (
    """
scaler = torch.cuda.amp.GradScaler()|scaler = GradScaler(enabled=x)|x = x.half()  # noqa: MPG101|x = x.half()
y = model(x.to(torch.float16))  # mpguard: ignore[MPG101, MPG302] meant|loss = model(x).mean()|loss.backward()
scaler.scale(loss).backward()|scaler.step(optimizer)|optimizer.step()|scaler.update()|model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())|convert_to_float8_training(model)|model = torch.compile(model)
accelerator = Accelerator(mixed_precision='fp16')|model, optimizer = accelerator.prepare(model, optimizer)|pass
""".strip()
    .replace("\n", "|")
    .split("|")
)
HEADERS = (
    "with torch.cuda.amp.autocast():", "with autocast('cuda'):", "if x:", "for x in y:", "try:", "class A:",
    "def train(x, model=None):",
)  # fmt: skip
IMPORTS = (
    "import torch\nfrom torch.amp import autocast, GradScaler\nfrom accelerate import Accelerator\n"
    "from torchao.float8 import convert_to_float8_training\n"
)


def indented(block: list[str]) -> list[str]:
    return [f"    {line}" for line in block]


def closed(header: str, block: list[str], more: list[str]) -> list[str]:
    ending = (
        ["finally:", *indented(more)] if header == "try:" else ["else:", *indented(more)] if header == "if x:" else more
    )
    return [header, *indented(block), *ending]


BLOCKS = st.recursive(
    st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=6),
    lambda inner: st.builds(closed, st.sampled_from(HEADERS), inner, inner),
    max_leaves=6,
)
CODE = st.builds(lambda block, end: IMPORTS + end.join(block) + end, BLOCKS, st.sampled_from(["\n", "\r\n"]))
CONTENTS = st.one_of(TEXTS.map(str.encode), st.binary(max_size=200), CODE.map(str.encode))
NAMES = st.sampled_from(["train.py", "mp.yaml", "ds.json"])


@given(CONTENTS, NAMES)
@settings(max_examples=400, deadline=None)
def test_nothing_makes_it_fail(data: bytes, name: str) -> None:
    kind = "python" if name.endswith(".py") else "config"
    engine = Engine(RULES, Options(fix="unsafe"))
    report = engine.check(Target(name, kind, named=True, data=data))
    assert not report.defects, report.defects[0].traceback
    if report.fix_result is None:
        return
    again = Engine(RULES, Options()).check(Target(name, kind, named=True, data=report.fix_result.after))
    assert not again.defects
    assert not {finding.code for finding in again.findings} & {"MPG000"}
    assert [finding.code for finding in again.findings] == [finding.code for finding in report.findings]
