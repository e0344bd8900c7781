from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from mpguard.lint import Bad, Call, Diagnostic, Dtype, Facts, Good, Note, Rule, any_of, dotted, lazy_pattern

#: What draws times at random: from [0, 1), as integers, or from a normal distribution that a sigmoid maps to (0, 1).
_DRAWS = frozenset({"torch.rand", "torch.randint", "torch.randn"})
#: Names of times, of variables and of arguments.
_TIME = lazy_pattern(r"(?i)^(?:t|ts|sigmas?|times?|time_?(?:step|stamp)s?)$")


class TimestepsInBfloat16(Rule):
    """The times of a diffusion model are drawn at random, and rounded to BF16.

    ## What it does
    Reports results of `torch.rand`, `torch.randint` and a sigmoid of `torch.randn` that are cast to BF16, or created in
    it, if they are a time by the name of the variable or of the argument: `timesteps`, `timestep=`, `t`, `sigma`.

    ## Why is this bad
    BF16 has 8 bits. Of the times in [0.5, 1) 128 are left, and of the integers below 1000 those above 256 become
    multiples of 2 or 4: the model is told another time than the one by which the noise was mixed, and never sees most
    of those that a sampler asks for. Compute with FP32 times; the model casts its embedding of them.

    ## Known limits
    Times from functions of other files, and a dtype that is that of another tensor, are unknown.
    """

    code, name = "MPG618", "timesteps-in-bfloat16"
    severity = "warning"
    message = "`{name}` is rounded to BF16: {left}"
    help = "keep the times in FP32, and cast what is computed from them"
    triggers = (
        any_of(b"rand(", b"randint(", b"sigmoid("),
        any_of(b"bfloat16", b"bf16"),
        any_of(b"backward(", b".training_step"),
    )
    examples = (
        Bad(
            """\
import torch
import torch.nn.functional as F

def train(model, loader, optimizer):
    for x in loader:
        x = x.to("cuda", torch.bfloat16)
        t = torch.rand(x.shape[0], 1, device="cuda").to(torch.bfloat16)  # !
        noise = torch.randn_like(x)
        loss = F.mse_loss(model((1 - t) * x + t * noise, timestep=t), noise - x)
        loss.backward()
        optimizer.step()
"""
        ),
        Good(
            """\
import torch
import torch.nn.functional as F

def train(model, loader, optimizer):
    for x in loader:
        x = x.to("cuda")
        t = torch.rand(x.shape[0], 1, device="cuda")
        noise = torch.randn_like(x)
        mixed = ((1 - t) * x + t * noise).to(torch.bfloat16)
        loss = F.mse_loss(model(mixed, timestep=t).float(), noise - x)
        loss.backward()
        optimizer.step()
"""
        ),
    )

    def check(self, facts: Facts) -> Iterator[Diagnostic]:
        if facts.declared == "inference":
            return
        reported: set[Call] = set()
        for cast in facts.events("cast"):
            if cast.may_be(Dtype.BF16) and not facts.is_inference(cast.call):
                records = facts.flow.backward(cast.subject, cast.call, depth=2) if cast.subject is not None else ()
                drawn = next((each for each in records if isinstance(each, Call) and _draws(each, facts)), None)
                if reported.isdisjoint(each for each in records if isinstance(each, Call)):
                    for found in self._found(cast.call, drawn, facts):
                        reported.add(cast.call)
                        yield found
        for name in ("rand", "randint", "randn"):
            for drawn in facts.calls.get(name, ()):
                given = drawn.argument(None, "dtype")
                low = given is not None and any(dtype is Dtype.BF16 for _, dtype in facts.dtypes(given, drawn))
                if not low or not _draws(drawn, facts):
                    continue
                if facts.is_inference(drawn) and not facts.flow.forward(drawn.node, drawn).training_sinks:
                    continue  # not a helper of the training, such as `sample_times`
                yield from self._found(drawn, drawn, facts)

    def _found(self, rounded: Call, drawn: Call | None, facts: Facts) -> Iterator[Diagnostic]:
        name = _name(rounded, facts) if drawn is not None else ""
        if drawn is not None and not _TIME.search(name) and rounded is drawn:  # a helper gives it to its callers
            names = facts.flow.forward(drawn.node, drawn).names
            name = next((each for each in sorted(names) if _TIME.search(each)), "")
        if drawn is not None and _TIME.search(name):
            left = "integers above 256 become others" if drawn.name == "randint" else "in [0.5, 1) it has 128 values"
            yield self.at(rounded, name=name, left=left, notes=(Note("drawn here", drawn.span),))


def _draws(call: Call, facts: Facts) -> bool:
    """True if a call draws times, or what a sigmoid makes times of."""
    if facts.called_path(call) not in _DRAWS:
        return False
    argument = facts.parent(call.node)
    above = facts.parent(argument) if isinstance(argument, cst.Arg) else None
    return call.name != "randn" or (isinstance(above, cst.Call) and dotted(above.func).endswith("sigmoid"))


def _name(call: Call, facts: Facts) -> str:
    """Return the name of the variable or the argument that gets the result of a call, also after further methods."""
    node: cst.CSTNode = call.node
    while isinstance(above := facts.parent(node), (cst.Attribute, cst.Call)):
        if isinstance(above, cst.Call) and above.func is not node:
            return ""
        node = above
    if isinstance(above, cst.Arg):
        return above.keyword.value if above.keyword is not None else ""
    target = above.targets[0].target if isinstance(above, cst.Assign) else None
    return dotted(target).rpartition(".")[2]
