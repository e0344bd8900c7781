"""Only the statements and methods that matter are parsed."""

from __future__ import annotations

from lint_facts import facts_of


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
