"""Programs whose matmuls are not in the policy's dtype, although modules return what the policy has.

Each has the recipe, the row of the proof that must fail, and the script after `short_programs.HEAD`.
"""

from __future__ import annotations

FUNCTION = """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return FORWARD
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return BACKWARD
class Layer(nn.Module):
    def __init__(s): super().__init__(); s.weight = nn.Parameter(torch.randn(32, 32) / 6)
    def forward(s, x): return Product.apply(x.bfloat16(), s.weight)
m = nn.Sequential(nn.Linear(32, 32), Layer()); train(m, adam(m))
"""


def function(forward: str, backward: str) -> str:
    """A layer that is an autograd function, with what it returns."""
    return FUNCTION.replace("FORWARD", forward).replace("BACKWARD", backward)


#: The backward of the layer in BF16, in FP32, in FP16, and in FP64 with numpy.
IN_BF16 = "(g @ w.bfloat16()).to(x.dtype), (g.t() @ x).to(w.dtype)"
IN_FP32 = "(g.float() @ w.float()).to(x.dtype), (g.float().t() @ x.float()).to(w.dtype)"
IN_FP16 = "(g.half() @ w.half()).to(x.dtype), (g.half().t() @ x.half()).to(w.dtype)"
IN_NUMPY = """(torch.from_numpy(g.double().numpy() @ w.double().numpy()).to(x.dtype),
            torch.from_numpy(g.double().numpy().T @ x.double().numpy()).to(w.dtype))"""

CUSTOM_OPERATOR = """
from torch import library
@library.custom_op('mylib::mm8', mutates_args=())
def mm8(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x.double() @ w.double().t()).to(x.dtype)
def setup(ctx, inputs, output): ctx.save_for_backward(*inputs)
def back(ctx, g):
    x, w = ctx.saved_tensors
    return mm8(g, w.t().to(g.dtype)), mm8(g.t(), x.t().to(g.dtype)).to(w.dtype)
mm8.register_autograd(back, setup_context=setup)
class Layer(nn.Module):
    def __init__(s): super().__init__(); s.weight = nn.Parameter(torch.randn(32, 32))
    def forward(s, x): return mm8(x, s.weight)
m = nn.Sequential(nn.Linear(32, 32), Layer()); train(m, adam(m))
"""

FUSED_CROSS_ENTROPY = """
class Fused(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, w, target):
        p, n = (x @ w.t()).softmax(-1), len(target)
        loss = -p[range(n), target].log().mean()
        p[range(n), target] -= 1
        ctx.save_for_backward(p @ w / n, p.t() @ x / n)
        return loss
    @staticmethod
    def backward(ctx, g): a, b = ctx.saved_tensors; return a * g, b * g, None
class N(nn.Module):
    def __init__(s): super().__init__(); s.body = net(); s.head = nn.Linear(32, 64, bias=False)
    def forward(s, x): return Fused.apply(s.body(x), s.head.weight, torch.arange(16))
m = N(); train(m, adam(m))
"""

ATTENTION = """
class Attend(nn.Module):
    def __init__(s): super().__init__(); s.qkv = nn.Linear(32, 96); s.out = nn.Linear(32, 32)
    def forward(s, x):
        qkv = s.qkv(x)
        with amp(enabled=False):
            q, k, v = qkv.view(1, 16, 3, 2, 16).permute(2, 0, 3, 1, 4).DTYPE()
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(16, 32).to(qkv.dtype)
        return s.out(y)
m = Attend(); train(m, adam(m), enabled=ENABLED)
"""

BF16_PART = """
class N(nn.Module):
    def __init__(s): super().__init__(); s.a = nn.Linear(32, 256); s.b = nn.Linear(256, 8)
    def forward(s, x):
        h = s.a(x)
        with amp(): return s.b(h).float()
m = N(); train(m, adam(m), enabled=False)
"""

#: A part of the model that computes in FP32; the rest in BF16.
ISLAND = """
import contextlib
@contextlib.contextmanager
def lost():
    torch.set_autocast_enabled("cpu", False)
    try: yield
    finally: torch.set_autocast_enabled("cpu", True)
from torch.utils.checkpoint import checkpoint
class N(nn.Module):
    def __init__(s): super().__init__(); s.body = nn.Linear(32, SIZE); s.island = MADE
    def forward(s, x):
        h = s.body(x)
        with FP32: h = h.float(); return HOW
m = N(); COMPILE; train(m, adam(m))
"""

#: Regions without autocast: one in which nothing of the script says that it wants it, and one in which the script does.
LOST, EXPLICIT = "lost()", "amp(enabled=False)"


def island(made: str, how: str = "s.island(h)", *, size: int = 32, compiled: bool = False, region: str = LOST) -> str:
    """A model with a part in FP32. how: calls it with `h`. size: of `h`. region: in which that runs."""
    script = ISLAND.replace("FP32", region).replace("SIZE", str(size)).replace("MADE", made).replace("HOW", how)
    return script.replace("COMPILE", "m.compile(backend='inductor')" if compiled else "pass")


#: Blocks with selective checkpointing. KEEP: an expression with the operators whose results are kept. INNER: a module.
KEPT = """
from functools import partial
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts as contexts
ops, Policy = torch.ops.aten, CheckpointPolicy
def keep(ctx, op, *a, **k): return Policy.MUST_SAVE if KEEP else Policy.PREFER_RECOMPUTE
class Attend(nn.Module):
    def __init__(s): super().__init__(); s.qkv = nn.Linear(32, 96); s.out = nn.Linear(32, 32)
    def forward(s, x):
        q, k, v = s.qkv(x).view(1, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(16, 32))
class InHalf(nn.Module):
    def __init__(s): super().__init__(); s.weight = nn.Parameter(torch.randn(32, 32) / 6)
    def forward(s, x):
        with amp(enabled=False): return (x.half() @ s.weight.half()).to(x.dtype)
class Block(nn.Module):
    def __init__(s): super().__init__(); s.inner = INNER
    def forward(s, x): return checkpoint(s.inner, x, use_reentrant=False, context_fn=partial(contexts, keep))
m = nn.Sequential(nn.Linear(32, 32), Block(), Block()); train(m, adam(m), 5)
"""


def kept(keep: str, inner: str) -> str:
    """A program with selective checkpointing. keep: the operators whose results are kept. inner: the module."""
    return KEPT.replace("KEEP", keep).replace("INNER", inner)


#: A mode of the script's own, in which matmuls run in numpy.
MODE = """
from torch.utils._python_dispatch import TorchDispatchMode
class Numpy(TorchDispatchMode):
    def __torch_dispatch__(s, op, types, args=(), kwargs=None):
        if op is not torch.ops.aten.addmm.default: return op(*args, **(kwargs or {}))
        bias, a, b = (each.detach().float().numpy().astype("float16") for each in args)
        return torch.from_numpy((a @ b + bias).astype("float32")).to(args[1].dtype)
m = net()
def step(x):
    with Numpy(): return m(x)
train(step, adam(m))
"""

BACKBONE = """
class N(nn.Module):
    def __init__(s):
        super().__init__(); s.head = nn.Linear(64, 8)
        s.backbone = net(64, 4).half().requires_grad_(False)
    def forward(s, x):
        with torch.no_grad(), amp(enabled=False): h = s.backbone(F.pad(x, (0, 32)).half())
        return s.head(h.float())
m = N(); train(m, torch.optim.AdamW(m.head.parameters()))
"""

COMPILED_BLOCK = """
class N(nn.Module):
    def __init__(s):
        super().__init__(); s.a = nn.Linear(32, 128); s.b = nn.Linear(128, 32)
        s.block = nn.Linear(32, 32); s.step = torch.compile(s.one, backend='aot_eager')
    def one(s, h):
        with amp(enabled=False): return s.block(h.float()).relu()
    def forward(s, x):
        h = s.b(s.a(x))
        for _ in range(48): h = s.step(h)
        return h
m = N(); train(m, adam(m))
"""

WARM_UP = """
m = net(); o = adam(m)
for _ in range(4):
    with amp(): m(x).float().sum().backward()
    o.zero_grad()
train(m, o, enabled=False)
"""

PROBE = """
m = net(); o = adam(m)
with amp(): m(torch.randn(512, 32)).float().sum().backward()
for p in m.parameters(): p.grad = None
train(m, o, enabled=False)
"""

DISCRIMINATOR = """
g, d = net(), net(); og, od = adam(g), adam(d)
for _ in range(3):
    with amp(): loss = d(g(torch.cat([x] * 4))).float().mean()
    loss.backward(); og.step(); og.zero_grad(); od.zero_grad()
    with amp(enabled=False): loss = d(x).mean() - d(g(x).detach()).mean()
    loss.backward(); od.step(); od.zero_grad()
"""

MICRO_BATCHES = """
m = net(); o = adam(m)
for i in range(8):
    with amp(enabled=i % 4 == 3): loss = m(x).float().pow(2).mean()
    loss.backward()
    if i % 4 == 3: o.step(); o.zero_grad()
"""

SAVED_IN = """
m = net(); o = adam(m); pack, unpack = lambda t: (t.dtype, t.DTYPE), lambda saved: saved[1].to(saved[0])
for _ in range(3):
    with amp(), torch.autograd.graph.saved_tensors_hooks(pack, unpack): loss = m(x).float().pow(2).mean()
    loss.backward(); o.step(); o.zero_grad()
"""

GRADIENTS_IN_HALF = """
a, b = net(), net(); o = torch.optim.AdamW([*a.parameters(), *b.parameters()])
for _ in range(3):
    with amp():
        h = a(x); h.register_hook(lambda g: g.half().to(g.dtype)); loss = b(h).float().pow(2).mean()
    loss.backward(); o.step(); o.zero_grad()
"""

QUANTIZED_BACKBONE = """
class N(nn.Module):
    def __init__(s):
        super().__init__(); s.head = nn.Linear(64, 8); s.scale = 20.0
        s.register_buffer("w", (torch.randn(64, 64) * 20).char())
    def forward(s, x):
        with torch.no_grad(): h = torch._int_mm((F.pad(x, (0, 32)) * s.scale).char(), s.w).float() / 400
        return s.head(h)
m = N(); train(m, adam(m))
"""

PER_SAMPLE_GRADIENTS = """
from torch.func import functional_call, grad, vmap
m = net(); o = adam(m)
def loss(p, row):
    with amp(enabled=False): return functional_call(m, p, (row[None],)).float().pow(2).mean()
for _ in range(3):
    each = vmap(grad(loss), in_dims=(None, 0))(dict(m.named_parameters()), x)
    for name, p in m.named_parameters(): p.grad = each[name].mean(0)
    o.step(); o.zero_grad()
"""

RECOMPUTATION = """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *p):
        ctx.save_for_backward(x)
        with torch.no_grad(): return m[2](m[1](x))
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors; x = x.detach().requires_grad_()
        with torch.enable_grad(): y = m[2](m[1](x.float()))
        torch.autograd.backward(y, g.float())
        return (x.grad, *[None] * 2)
class N(nn.Module):
    def __init__(s): super().__init__(); s.m = net()
    def forward(s, x): return Recompute.apply(s.m[0](x), s.m[2].weight, s.m[2].bias)
n = N(); m = n.m; train(n, adam(n))
"""

EXPERTS = "nn.ParameterList([torch.randn(4, 32, 32) / 6])"

#: Outside of modules and of autocast: attention, whose result a weight multiplies; a head, in parts of its weight.
ATTENTION_AFTER = """
a, b = nn.Linear(32, 96), nn.Linear(32, 32); p = [*a.parameters(), *b.parameters()]; o = torch.optim.AdamW(p)
x = torch.randn(64, 32)
for _ in range(3):
    with amp(): q, k, v = a(x).chunk(3, -1)
    h = (q.float() @ k.float().t()).softmax(-1) @ v.float()
    with amp(): y = b(h)
    y.float().pow(2).mean().backward(); o.step(); o.zero_grad()
"""

HEAD_IN_PARTS = """
m = net(); w = nn.Parameter(torch.randn(256, 32) / 6); o = torch.optim.AdamW([*m.parameters(), w])
for _ in range(3):
    with amp(): h = m(x)
    h = F.pad(h, (0, 24)) if h.shape[-1] < 32 else h
    y = torch.cat([h.float() @ w[i : i + 64].t() for i in range(0, 256, 64)], -1)
    y.pow(2).mean().backward(); o.step(); o.zero_grad()
"""

WRONG: dict[str, tuple[str, str, str]] = {
    "attention_after_autocast": ("bf16_mixed", "compute", ATTENTION_AFTER),
    "a_head_in_parts_after_autocast": ("bf16_mixed", "compute", HEAD_IN_PARTS),
    "fp16_inside_a_function": ("bf16_mixed", "compute", function("(x.half() @ w.half().t()).bfloat16()", IN_FP16)),
    "fp32_inside_a_function": ("bf16_mixed", "compute", function("(x.float() @ w.float().t()).bfloat16()", IN_FP32)),
    "a_backward_in_fp32": ("bf16_mixed", "compute", function("x @ w.bfloat16().t()", IN_FP32)),
    "int8_inside_a_function": (
        "bf16_mixed", "compute", function("torch._int_mm(x.char(), w.char().t().contiguous()).bfloat16()", IN_BF16),
    ),
    "numpy_inside_a_function": (
        "bf16_mixed", "compute",
        function("torch.from_numpy(x.double().numpy() @ w.detach().double().numpy().T).bfloat16()", IN_NUMPY),
    ),
    "numpy_inside_a_function_whose_batch_is_its_width": (
        "bf16_mixed", "compute",
        function("torch.from_numpy(x.double().numpy() @ w.detach().double().numpy().T).bfloat16()", IN_NUMPY)
        .replace("m = nn.S", "x = torch.randn(32, 32); m = nn.S"),
    ),
    "fp64_inside_a_custom_operator": ("bf16_mixed", "compute", CUSTOM_OPERATOR),
    "fused_linear_and_cross_entropy_in_fp32": ("bf16_mixed", "compute", FUSED_CROSS_ENTROPY),
    "bf16_attention_under_fp32": (
        "fp32", "attention", ATTENTION.replace("DTYPE", "bfloat16").replace("ENABLED", "False"),
    ),
    "fp16_attention_under_bf16": (
        "bf16_mixed", "attention", ATTENTION.replace("DTYPE", "half").replace("ENABLED", "True"),
    ),
    "a_bf16_part_under_fp32": ("fp32", "compute", BF16_PART),
    "a_bilinear_layer_in_fp32": ("bf16_mixed", "compute", island("nn.Bilinear(32, 32, 8)", "s.island(h, h)")),
    "a_linear_layer_in_fp32_is_40_percent": ("bf16_mixed", "compute", island("nn.Linear(32, 22)")),
    "a_convolution_in_fp32": (
        "bf16_mixed", "compute", island("nn.Conv1d(4, 4, 3, padding=1)", "s.island(h.view(16, 4, 8))"),
    ),
    "an_lstm_in_fp32": ("bf16_mixed", "compute", island("nn.LSTM(32, 16)", "s.island(h)[0]")),
    "stacked_experts_in_fp32": (
        "bf16_mixed", "compute", island(EXPERTS, "torch.bmm(h.view(4, 4, 32), s.island[0]).flatten(0, 1)"),
    ),
    "a_checkpointed_block_in_fp32": (
        "bf16_mixed", "compute", island("nn.Linear(32, 32)", "checkpoint(s.island, h, use_reentrant=True)"),
    ),
    "a_frozen_backbone_in_fp16": ("bf16_mixed", "frozen parts", BACKBONE),
    "a_compiled_block_that_is_called_often": ("bf16_mixed", "compute", COMPILED_BLOCK),
    "most_of_a_compiled_model_in_fp32": (
        "bf16_mixed", "compute", island("nn.Linear(32, 96)", compiled=True, region=EXPLICIT),
    ),
    "most_of_a_model_in_fp32": ("bf16_mixed", "compute", island("nn.Linear(32, 96)", region=EXPLICIT)),
    "a_part_without_autocast_of_another_device": (
        "bf16_mixed", "compute", island("nn.Linear(32, 22)", region="torch.autocast('cuda', enabled=False), lost()"),
    ),
    "a_part_in_fp64_by_the_script": (
        "bf16_mixed", "compute", island("nn.Linear(32, 22).double()", "s.island(h.double())", region=EXPLICIT),
    ),
    "warm_up_passes_in_bf16": ("bf16_mixed", "compute", WARM_UP),
    "a_probe_of_the_batch_size_in_bf16": ("bf16_mixed", "compute", PROBE),
    "a_discriminator_in_fp32": ("bf16_mixed", "compute", DISCRIMINATOR),
    "micro_batches_in_fp32": ("bf16_mixed", "compute", MICRO_BATCHES),
    "a_quantized_backbone": ("bf16_mixed", "frozen parts", QUANTIZED_BACKBONE),
    "per_sample_gradients_in_fp32": ("bf16_mixed", "compute", PER_SAMPLE_GRADIENTS),
    "a_kept_product_in_fp16": ("bf16_mixed", "compute", kept("op == ops.mm.default", "InHalf()")),
    "a_product_in_fp16_that_is_recomputed": ("bf16_mixed", "compute", kept("'relu' in str(op)", "InHalf()")),
    "numpy_in_a_mode_of_the_script": ("bf16_mixed", "compute", MODE),
    "a_recomputation_in_fp32": ("bf16_mixed", "compute", RECOMPUTATION),
    "activations_saved_in_half": ("bf16_mixed", "compute", SAVED_IN.replace("DTYPE", "half()")),
    "gradients_that_a_hook_casts_to_half": ("bf16_mixed", "compute", GRADIENTS_IN_HALF),
    "activations_saved_in_fp8": ("bf16_mixed", "compute", SAVED_IN.replace("DTYPE", "to(torch.float8_e5m2)")),
}  # fmt: skip
