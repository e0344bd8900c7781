"""The dtypes of tensors and the numbers that are combined with them, compared with torch itself."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from lint_facts import facts_of

from mpguard.lint.facts.behaviour import autocast_ops


def dtypes(code: str) -> set[str | None]:
    """The dtypes that the argument of `use(...)` may have."""
    facts = facts_of(code)
    (call,) = facts.calls["use"]
    found = {each.dtype for each in facts.precision.of(call.positional[0], call)}
    return {dtype if dtype is None or isinstance(dtype, str) else dtype.torch_name for dtype in found}


# -- against torch ---------------------------------------------------------------------------------------

EXPRESSIONS = [
    "a", "h", "h + 1", "h * 0.5 - 2", "h + a", "h @ h", "a.half()", "h.float()",
    "h.to(torch.bfloat16)", "h.to(a.dtype)",
    "a.type_as(h)", "h.view(-1)[0]", "h.masked_fill(h > 0, 1.0)", "torch.where(h > 0, h, 0.0)",
    "torch.where(h > 0, h, a)", "h.softmax(-1)", "torch.softmax(h, -1, dtype=torch.float32)", "h.pow(2).mean()",
    "(h ** 2).sum(-1)", "torch.zeros(3, dtype=torch.float16)", "torch.zeros_like(h)", "torch.ones(3)", "-h.T",
    "torch.cat([h, h])", "torch.cat([h, a])", "h.new_zeros(3)", "torch.matmul(h, h.transpose(-1, -2)) / math.sqrt(8)",
    "torch.einsum('ij,jk->ik', h, h)", "torch.bmm(h[None], h[None])", "F.linear(h, h)", "F.relu(h)",
    "h.clamp(min=1e-8)",
    "h.bfloat16() + h", "h.double() + h", "h.long() + h", "torch.full((2,), 1.0, dtype=torch.half)",
    "h if h is not None else h", "h / h.size(-1)", "abs(h)", "h.chunk(2)[0]", "torch.tensor(2.0) * h",
    "torch.finfo(torch.float32).eps + h", "F.cross_entropy(h, torch.arange(4))", "torch.arange(4).half()",
    "h.square().mean(-1)", "h.exp()", "torch.linspace(0, 1, 3)", "(z := h)", "h.norm(dim=-1)",
    "h.type(torch.HalfTensor)", "F.normalize(h)",
]  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_derived_dtypes_equal_those_of_torch(expression: str) -> None:
    """Outside autocast, each dtype that is known is the one that torch gives."""
    torch = pytest.importorskip("torch")
    import math

    scope = {
        "torch": torch,
        "F": torch.nn.functional,
        "math": math,
        "a": torch.randn(4, 4),
        "h": torch.randn(4, 4).half(),
    }
    real = str(eval(expression, scope).dtype).removeprefix("torch.")
    code = "import math\nimport torch\nimport torch.nn.functional as F\n"
    code += f"a = torch.randn(4, 4)\nh = torch.randn(4, 4).half()\nuse({expression})\n"
    assert dtypes(code) == {real}


def test_lowered_operations_run_in_low_precision_in_torch() -> None:
    """In an FP16 region on a CPU, what the table calls lowered comes out in FP16, from FP32 operands."""
    torch = pytest.importorskip("torch")
    a = torch.randn(4, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        for name in ("matmul", "mm"):
            assert name in autocast_ops.LOWERED
            assert getattr(torch, name)(a, a).dtype == torch.float16
        assert torch.einsum("ij,jk->ik", a, a).dtype == torch.float16
        assert (a + a).dtype == torch.float32


def test_tables_equal_the_header_of_the_installed_torch() -> None:
    """The lists of operations are those of the header that torch brings; what it has beyond them is internal."""
    torch = pytest.importorskip("torch")
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text()

    def listed(macro: str) -> set[str]:
        body = text.split(f"#define {macro}(_)", 1)[1].split("\n\n", 1)[0]
        found = re.findall(r"_\((?:ADD_NS\()?(\w+)", body)
        return {name.removeprefix("linalg_") for name in found if not name.startswith("_")}

    lowered = listed("AT_FORALL_LOWER_PRECISION_FP") - {"convolution"}
    assert lowered == autocast_ops.LOWERED
    raised = listed("AT_FORALL_FP32") | listed("AT_FORALL_FP32_SET_OPT_DTYPE")
    raised |= listed("AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE")
    assert {name for name in raised if not name.startswith("upsample")} <= autocast_ops.FLOAT32_ON_CUDA
    composed = {"cross_entropy", "gaussian_nll_loss", "interpolate", "upsample", "softmin", "square", "normalize"}
    assert autocast_ops.FLOAT32_ON_CUDA - raised == composed
    assert not autocast_ops.LOWERED & autocast_ops.FLOAT32_ON_CUDA
    assert not autocast_ops.KEEPS & (autocast_ops.LOWERED | autocast_ops.FLOAT32_ON_CUDA)


@pytest.mark.parametrize(
    ("operation", "raises"),
    [
        ("h.masked_fill(h > 0, -1e9)", True),
        ("h.masked_fill(h > 0, -65504.0)", False),
        ("h.masked_fill(h > 0, -65510.0)", True),
        ("h.masked_fill(h > 0, torch.finfo(torch.float32).min)", True),
        ("h.bfloat16().masked_fill(h > 0, -1e9)", False),
        ("h.bfloat16().masked_fill(h > 0, torch.finfo(torch.float32).min)", True),
        ("torch.full((2,), -1e9, dtype=torch.float16)", True),
        ("h.clamp(min=-1e9)", True),
        ("torch.where(h > 0, h, -1e9)", False),
    ],
)
def test_out_of_range_numbers_raise_or_become_infinite(operation: str, raises: bool) -> None:
    """What the rules' pages say that torch does."""
    torch = pytest.importorskip("torch")
    scope = {"torch": torch, "h": torch.ones(4).half()}
    if raises:
        with pytest.raises(RuntimeError, match="without overflow"):
            eval(operation, scope)
    else:
        eval(operation, scope)


# -- autocast, names, callers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("with torch.autocast('cuda', dtype=torch.float16):\n    use(q @ k)", {"float16"}),
        ("with torch.autocast('cuda'):\n    use(torch.nn.Linear(8, 8)(q))", {"float16"}),
        ("with torch.autocast('cuda'):\n    use((q @ k).softmax(-1))", {"float32"}),
        ("with torch.autocast('cpu', dtype=torch.float16):\n    use((q @ k).softmax(-1))", {None}),
        ("with torch.autocast('cuda'):\n    use((q @ k) * (q @ k))", {"float16"}),
        ("with torch.autocast('cuda'):\n    use((q @ k) ** 2)", {"float32"}),
        ("with torch.autocast('cuda'):\n    use((q @ k) + q)", {None}),
        (
            "with torch.autocast('cuda'):\n    with torch.autocast('cuda', enabled=False):\n        use(q.float() @ k)",
            {"float32"},
        ),
        ("with torch.autocast('cuda', dtype=q.dtype):\n    use(q @ k)", {None}),
        ("with q.context():\n    use((q @ k).half().softmax(-1))", {None}),
        ("use(q @ k)", {None}),
        ("x = q.half()\nx = x.float()\nuse(x)", {"float32"}),
        ("x = q.half()\nx += k\nuse(x)", {"float16"}),
        ("x = 0\nx += q.half()\nuse(x)", {"float16"}),
        ("x, y = q.half(), k\nuse(x)", {"float16"}),
        ("x, y = q.half().chunk(2)\nuse(y)", {"float16"}),
        ("def f(z):\n    return z.half()\nuse(f(q))", {"float16"}),
        ("def f(z):\n    use(z)\nf(q.half())", {"float16"}),
        ("use(q.half().unknown())", {None}),
        ("x = x + x\nuse(x)", set()),
    ],
)  # fmt: skip
def test_dtypes(body: str, expected: set[str | None]) -> None:
    assert dtypes("import torch\n\ndef main(q, k):\n" + textwrap.indent(body, "    ")) == expected


def test_prepared_models_run_in_the_accelerators_dtype() -> None:
    code = """
        import torch
        from accelerate import Accelerator

        class Net(torch.nn.Module):
            def forward(self, x):
                use(x @ x)

        def main(loader):
            accelerator = Accelerator(mixed_precision="fp16")
            model = accelerator.prepare(Net())
            for x in loader:
                model(x)
    """
    assert dtypes(code) == {"float16"}
    assert dtypes(code.replace('"fp16"', '"bf16"')) == {"bfloat16"}
    assert dtypes(code.replace('mixed_precision="fp16"', "")) == {None}


def test_layers_run_under_the_autocast_of_their_parent_modules() -> None:
    code = """
        import torch
        from torch import nn

        class Attention(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.q = nn.Linear(dim, dim)

            def forward(self, x):
                use(self.q(x) / 8)

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = Attention(8)

            def forward(self, x):
                return x + self.attention(x)

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.blocks = nn.ModuleList([Block() for _ in range(4)])

            def forward(self, x):
                for block in self.blocks:
                    x = block(x)
                return x

        def train(loader):
            model = nn.parallel.DistributedDataParallel(Net().cuda())
            for x in loader:
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = model(x).sum()
    """
    assert dtypes(code) == {"float16"}
    assert dtypes(code.replace("for block in self.blocks:", "with self.amp():\n" + " " * 20 + "pass")) == {"weights"}
    assert dtypes(code + "\n        other = Block()\n") == {"float16"}  # which nothing calls
    assert dtypes(code + "\n        other = Block()\n        other(1)\n") == {"float16", "weights"}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("-1e9", -1e9),
        ("-2 ** 31", -(2.0**31)),
        ("float('-1e30')", -1e30),
        ("NEG", -1e4),
        ("torch.finfo(torch.float16).min", -65504.0),
        ("-torch.finfo(torch.float).max", -3.4028234663852886e38),
        ("eps", 1e-8),
        ("given", None),
        ("x.eps", None),
        ("10 ** 400", None),
        ("1 / 0", None),
    ],
)
def test_numbers(expression: str, expected: float | None) -> None:
    facts = facts_of(f"import torch\nNEG = -1e4\ndef main(x, given, eps=1e-8):\n    use({expression})\n")
    (call,) = facts.calls["use"]
    found = facts.scalars.number(call.positional[0], call)
    assert (found.value if found is not None else None) == expected
