"""Only the statements and methods that matter are parsed."""

from __future__ import annotations

from lint_facts import facts_of

from mpguard.lint.rules.autocast.deprecated_cuda_amp import DeprecatedCudaAmp
from mpguard.policy.dtype import Dtype


def test_only_the_relevant_statements_of_a_large_file_are_parsed() -> None:
    filler = "".join(f"def filler_{n}(x):\n    return x + {n}\n\n" for n in range(400))
    code = f"import torch\n{filler}class Net(torch.nn.Module):\n    pass\n\n"
    code += "def train(x):\n    Net()(x.half()).backward()\n    optimizer.step()\n"
    facts = facts_of(code)
    assert facts.parsed_bytes < 200
    (cast,) = facts.events("cast")
    assert [sink.kind for sink in facts.flow.forward(cast.call.node, cast.call).sinks] == ["backward"]


def test_only_the_relevant_methods_of_a_large_class_are_parsed() -> None:
    filler = "".join(f"    def filler_{n}(self):\n        return self.size + {n}\n\n" for n in range(400))
    code = f"""import torch
class Run:
    def __init__(self, model):
        self.model = model

{filler}    def sets(self, loss):
        self.loss = loss

    def helps(self, x):
        return x

    def epoch(self, loader):
        for x in loader:
            self.train(x)

    def train(self, x):
        self.model(self.helps(x.half())).backward()
        optimizer.step()
"""
    facts = facts_of(code)
    (chunk,) = [each for each in facts.source.chunks if each.methods]
    skipped = {each.name for each in chunk.skipped}
    assert skipped == {f"filler_{n}" for n in range(400)}
    assert facts.parsed_bytes < len(code) * 0.65
    (cast,) = facts.events("cast")
    assert [sink.kind for sink in facts.flow.forward(cast.call.node, cast.call).sinks] == ["backward"]
    assert facts.source.position(cast.span[0])[0] == code[: code.index("x.half")].count("\n") + 1


def test_words_in_comments_and_docstrings_make_no_statement_relevant() -> None:
    filler = "".join(
        f'def filler_{n}(x):\n    """For backward compatibility, in float16."""\n    return x + {n}  # x.half()\n\n'
        for n in range(200)
    )
    code = f'import torch\n{filler}def train(x):\n    model(f"""{{x.half()}}""")\n    y = \'# \' + x.bfloat16()\n'
    facts = facts_of(code)
    assert facts.parsed_bytes < 200
    assert len(list(facts.events("cast"))) == 2


def test_the_fix_of_an_import_changes_every_use() -> None:
    """`custom_fwd` of torch.amp needs a device, also where a function contains nothing else about precision."""
    filler = "".join(f"def filler_{n}(x):\n    return x + {n}\n\n" for n in range(400))
    code = f"""from torch.cuda.amp import custom_fwd
{filler}class F(Function):
    @custom_fwd
    def forward(ctx, x):
        return x

class G(Function):
    @custom_fwd(cast_inputs=torch.float32)
    def forward(ctx, x):
        return x
"""
    (found,) = DeprecatedCudaAmp().check(facts_of(code))
    assert found.fix is not None
    assert [edit.text for edit in found.fix.edits].count('(device_type="cuda")') == 1
    assert [edit.text for edit in found.fix.edits].count('device_type="cuda", ') == 1


def test_the_names_that_imports_give_are_relevant() -> None:
    filler = "".join(f"def filler_{n}(x):\n    return x + {n}\n\n" for n in range(400))
    code = f"from torch.cuda.amp import autocast as ac\n{filler}@ac()\ndef forward(x):\n    return x\n"
    (found,) = DeprecatedCudaAmp().check(facts_of(code))
    assert found.fix is not None
    assert '"cuda"' in {edit.text for edit in found.fix.edits}


def test_a_class_that_creates_layers_in_a_dtype_is_parsed() -> None:
    filler = "".join(f"def filler_{n}(x):\n    return x + {n}\n\n" for n in range(400))
    facts = facts_of(f"""import torch
from torch import nn
{filler}class Net(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.head = nn.Linear(8, 8, dtype=cfg["dtype"])

def build():
    return Net({{"dtype": torch.bfloat16}})
""")
    (event,) = facts.events("construct")
    assert [dtype for _, dtype in event.dtypes] == [Dtype.BF16]
