"""Ordinary programs whose precision is the policy's: each is proven. With the recipe, after `short_programs.HEAD`."""

from __future__ import annotations

from wrong_programs import EXPLICIT, IN_BF16, PER_SAMPLE_GRADIENTS, function, island, kept

SDPA = """
class Attend(nn.Module):
    def __init__(s): super().__init__(); s.qkv = nn.Linear(32, 96); s.out = nn.Linear(32, 32)
    def forward(s, x):
        q, k, v = s.qkv(x).view(1, 16, 3, 2, 16).permute(2, 0, 3, 1, 4)
        return s.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(16, 32))
m = Attend(); train(m, adam(m))
"""

FROZEN_ENCODER = """
vae = net(64, 4).requires_grad_(False); m = nn.Linear(64, 8)
def step(x):
    with torch.no_grad(), amp(enabled=False): h = vae(F.pad(x, (0, 32)))
    return m(h)
train(step, adam(m))
"""

EXCHANGED = """
m = net(); o = adam(m); torch.__future__.set_swap_module_params_on_conversion(True)
with amp(): m(x)
m.to(torch.float32); train(m, o)
"""

LORA = """
class Lora(nn.Module):
    def __init__(s, base):
        super().__init__(); s.base = base; s.a = nn.Linear(32, 4, False); s.b = nn.Linear(4, 32, False)
    def forward(s, x): return s.base(x) + s.b(s.a(x))
m = net().requires_grad_(False); m[0], m[2] = Lora(m[0]), Lora(m[2])
train(m, torch.optim.AdamW([p for p in m.parameters() if p.requires_grad]))
"""

GRAPH = """
import warnings; warnings.simplefilter("ignore")  # torch's, of sparse tensors
edges = torch.sparse_coo_tensor(torch.randint(0, 16, (2, 40)), torch.ones(40), (16, 16)).coalesce()
m = net(); o = adam(m)
for _ in range(3):
    with amp(): h = m(x)
    torch.sparse.mm(LAYOUT, h.float()).pow(2).mean().backward(); o.step(); o.zero_grad()
"""

EXCHANGED_LATER = """
m = net(); o = adam(m); train(m, o)
for p in m.parameters(): torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone()))
train(m, o)
"""

#: The similarities of a contrastive loss, in FP32 after the autocast region: both factors are results of the model.
CONTRASTIVE = """
m = net(); o = adam(m)
for _ in range(3):
    with amp(): z = m(x)
    z = F.normalize(z.float(), dim=-1); sim = z @ z.t()
    F.cross_entropy(sim / .2, torch.arange(16)).backward(); o.step(); o.zero_grad()
"""

#: The same in a module of its own, which has no weights.
CONTRASTIVE_MODULE = """
class Loss(nn.Module):
    def forward(s, z): z = F.normalize(z.float(), dim=-1); return F.cross_entropy(z @ z.t(), torch.arange(16))
m = net(); o = adam(m); loss = Loss()
for _ in range(3):
    with amp(): z = m(x)
    loss(z).backward(); o.step(); o.zero_grad()
"""

#: Operators that have no 16 bits: an FFT and complex weights, a matrix exponential, distances.
SPECTRAL = """
class Spectral(nn.Module):
    def __init__(s):
        super().__init__(); s.a, s.b = nn.Linear(32, 32), nn.Linear(32, 32)
        s.w = nn.Parameter(torch.randn(17, 17, dtype=torch.cfloat) / 5)
    def forward(s, x): return s.b(torch.fft.irfft(torch.fft.rfft(s.a(x).float()) @ s.w, n=32))
m = Spectral(); train(m, adam(m))
"""

ORTHOGONAL = """
from torch.nn.utils.parametrizations import orthogonal
m = nn.Sequential(nn.Linear(32, 32), orthogonal(nn.Linear(32, 32))); train(m, adam(m))
"""

DISTANCES = "m = net(); train(lambda x: torch.cdist(m(x).float(), m(x).float()), adam(m))"

#: K-FAC: statistics of the gradients, in a hook of the backward pass.
STATISTICS_IN_HOOKS = """
m = net(); o = adam(m); kept = {}
for each in m[::2]: each.register_full_backward_hook(lambda s, _, g: kept.update({s: g[0].float().t() @ g[0].float()}))
x = x.requires_grad_(); train(m, o)
"""

#: In FP32 because the script says so: the head, nearly all of a small model with a large vocabulary.
LARGE_HEAD = """
class LM(nn.Module):
    def __init__(s): super().__init__(); s.e, s.a, s.h = nn.Embedding(4096, 32), nn.Linear(32, 32), nn.Linear(32, 4096)
    def forward(s, x):
        h = s.a(s.e(x.argmax(-1)))
        with amp(enabled=False): return s.h(h.float())
m = LM(); train(m, adam(m))
"""

GAN = """
g, d = net(), net(); og, od = adam(g), adam(d)
for _ in range(3):
    with amp(): loss = d(g(x)).float().mean()
    loss.backward(); og.step(); og.zero_grad(); od.zero_grad()
    with amp(): loss = (d(x) - d(g(x).detach())).float().mean()
    loss.backward(); od.step(); od.zero_grad()
"""

CHECKPOINTING = """
from torch.utils.checkpoint import checkpoint
class Block(nn.Module):
    def __init__(s, reentrant): super().__init__(); s.inner = net(); s.reentrant = reentrant
    def forward(s, x): return checkpoint(s.inner, x, use_reentrant=s.reentrant)
m = nn.Sequential(nn.Linear(32, 32), Block(True), Block(False)); train(m, adam(m))
"""

REGIONAL = """
m = nn.Sequential(nn.Linear(32, 32), net(), net(), nn.Linear(32, 8))
for block in m[1:3]: block.compile(backend="inductor")
train(m, adam(m))
"""

ACCUMULATION = """
m = net(); o = adam(m)
for i in range(80):
    with amp(): loss = m(x).float().pow(2).mean()
    loss.backward()
    if i % 40 == 39: o.step(); o.zero_grad()
"""

PROFILER = """
from torch.profiler import ProfilerActivity, profile, schedule
m = net(); o = adam(m)
with profile(activities=[ProfilerActivity.CPU], acc_events=True,
             schedule=schedule(wait=1, warmup=1, active=2, repeat=1)) as p:
    for _ in range(12):
        with amp(): loss = m(x).float().pow(2).mean()
        loss.backward(); o.step(); o.zero_grad(); p.step()
print("their events", len(p.events()) > 50)
"""

RANGES = """
m = net(); o = adam(m)
with torch.profiler.record_function("epoch"):
    for _ in range(4):
        with torch.profiler.record_function("step"):
            with amp(): loss = m(x).float().pow(2).mean()
            loss.backward()
            with torch.profiler.record_function("update"): o.step(); o.zero_grad()
"""

GRADIENT_PENALTY = """
m = net(); o = adam(m)
for _ in range(3):
    inputs = x.clone().requires_grad_()
    with amp(): out = m(inputs).float().sum()
    penalty = torch.autograd.grad(out, inputs, create_graph=True)[0].pow(2).mean()
    (out + penalty).backward(); o.step(); o.zero_grad()
"""

LAZY_OPTIMIZER = """
m = net(); o = adam(m); sizes = []
for size in (64, 32):
    with amp(): m(torch.randn(size, 32)).float().sum().backward()
    m.zero_grad()
m.eval()
with torch.no_grad(): m(x)
train(m.train(), o)
"""

TWO_FORWARDS = """
m = net(); o = adam(m)
for _ in range(3):
    with amp(): one, two = m(x).float().mean(), m(2 * x).float().mean()
    one.backward(); two.backward(); o.step(); o.zero_grad()
"""

SELECTIVE_CHECKPOINTING = """
from functools import partial
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts as contexts
Policy = CheckpointPolicy
def keep(ctx, op, *a, **k):
    return Policy.MUST_SAVE if op == torch.ops.aten.mm.default else Policy.PREFER_RECOMPUTE
class Block(nn.Module):
    def __init__(s): super().__init__(); s.inner = net()
    def forward(s, x): return checkpoint(s.inner, x, use_reentrant=False, context_fn=partial(contexts, keep))
m = nn.Sequential(nn.Linear(32, 32), Block(), Block()); train(m, adam(m), 5)
"""

#: A block with layers of other widths than its inputs: a kept operator's weight is no square.
WIDE = "nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 96), nn.SiLU(), nn.Linear(96, 32))"

#: A function that multiplies by no matrix; the batch is as large as the width.
GATE = """
class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b): ctx.save_for_backward(a, b); return a * b.sigmoid()
    @staticmethod
    def backward(ctx, g): a, b = ctx.saved_tensors; s = b.sigmoid(); return g * s, g * a * s * (1 - s)
class N(nn.Module):
    def __init__(s): super().__init__(); s.a, s.b, s.c = (nn.Linear(32, 32) for _ in range(3))
    def forward(s, x): return s.c(Gate.apply(s.a(x), s.b(x)))
x = torch.randn(32, 32); m = N(); train(m, adam(m))
"""

HEAD_AFTER = """
m, head = net(), nn.Linear(32, 16); o = torch.optim.AdamW([*m.parameters(), *head.parameters()])
for _ in range(3):
    with amp(): h = m(x)
    with amp(enabled=False): loss = head(h.float()).pow(2).mean()
    loss.backward(); o.step(); o.zero_grad()
"""

CLOSURE = """
m = net(); o = torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=4)
def closure():
    o.zero_grad()
    with amp(): loss = m(x).float().pow(2).mean()
    loss.backward(); return loss
for _ in range(5): o.step(closure)
"""

THREAD = """
import threading
m = net(); o = adam(m)
t = threading.Thread(target=train, args=(m, o, 5)); t.start(); t.join()
"""

WORKERS = """
from torch.utils.data import DataLoader
m = net(); o = adam(m)
for epoch in range(2):
    for batch in DataLoader(x, batch_size=4, num_workers=2, multiprocessing_context="fork"):
        with amp(): loss = m(batch).float().pow(2).mean()
        loss.backward(); o.step(); o.zero_grad()
"""

COMPILED_STEP = """
m = net(); o = adam(m, lr=torch.tensor(0.01)); s = torch.optim.lr_scheduler.LinearLR(o, total_iters=3)
def update(): o.step(); s.step()
update = torch.compile(update, backend="aot_eager")
for _ in range(3):
    with amp(): loss = m(x).float().pow(2).mean()
    loss.backward(); update(); o.zero_grad()
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1 and s.last_epoch == 3
"""

RIGHT: dict[str, tuple[str, str]] = {
    "ordinary_loop": ("bf16_mixed", "m = net(); train(m, adam(m))"),
    "fp32_loop": ("fp32", "m = net(); train(m, adam(m), enabled=False)"),
    "custom_function": ("bf16_mixed", function("x @ w.bfloat16().t()", IN_BF16)),
    "sdpa": ("bf16_mixed", SDPA),
    "lstm": ("bf16_mixed", "n = nn.LSTM(32, 64, 2); m = lambda x: n(x[None])[0]; train(m, adam(n))"),
    "frozen_encoder_in_fp32": ("bf16_mixed", FROZEN_ENCODER),
    "lora": ("bf16_mixed", LORA),
    "gan": ("bf16_mixed", GAN),
    "activation_checkpointing": ("bf16_mixed", CHECKPOINTING),
    "compiled": ("bf16_mixed", "m = torch.compile(net()); train(m, adam(m))"),
    "compiled_step": ("bf16_mixed", COMPILED_STEP),
    "compiled_blocks": ("bf16_mixed", REGIONAL),
    "gradient_accumulation": ("bf16_mixed", ACCUMULATION),
    "parameters_exchanged_after_a_forward_pass": ("bf16_mixed", EXCHANGED),
    "parameters_exchanged_after_steps": ("bf16_mixed", EXCHANGED_LATER),
    "a_sparse_graph": ("bf16_mixed", GRAPH.replace("LAYOUT", "edges")),
    "a_sparse_graph_by_rows": ("bf16_mixed", GRAPH.replace("LAYOUT", "edges.to_sparse_csr()")),
    "own_profiler": ("bf16_mixed", PROFILER),
    "own_ranges": ("bf16_mixed", RANGES),
    "gradient_penalty": ("bf16_mixed", GRADIENT_PENALTY),
    "warm_up_and_evaluation": ("bf16_mixed", LAZY_OPTIMIZER),
    "two_forward_passes": ("bf16_mixed", TWO_FORWARDS),
    "per_sample_gradients": ("bf16_mixed", PER_SAMPLE_GRADIENTS.replace("enabled=False", "")),
    "selective_checkpointing": ("bf16_mixed", SELECTIVE_CHECKPOINTING),
    "products_are_kept": ("bf16_mixed", kept("op in (ops.mm.default, ops.addmm.default)", WIDE)),
    "everything_is_kept": ("bf16_mixed", kept("True", WIDE)),
    "attention_is_kept": ("bf16_mixed", kept("'attention' in str(op)", "Attend()")),
    "a_head_in_fp32_by_the_script": ("bf16_mixed", island("nn.Linear(32, 22)", region=EXPLICIT)),
    "a_part_in_fp32_by_the_script_that_is_checkpointed": (
        "bf16_mixed",
        island("nn.Linear(32, 22)", "checkpoint(s.island, h, use_reentrant=False)", region=EXPLICIT),
    ),
    "a_part_in_fp32_by_the_script_that_is_compiled": (
        "bf16_mixed",
        island("nn.Linear(32, 22)", compiled=True, region=EXPLICIT),
    ),
    "a_function_of_activations_with_a_weights_shape": ("bf16_mixed", GATE),
    "a_head_in_fp32_after_autocast": ("bf16_mixed", HEAD_AFTER),
    "a_large_head_in_fp32_by_the_script": ("bf16_mixed", LARGE_HEAD),
    "a_contrastive_loss_in_fp32_by_the_script": ("bf16_mixed", CONTRASTIVE),
    "a_contrastive_loss_in_fp32_by_the_script_in_a_module": ("bf16_mixed", CONTRASTIVE_MODULE),
    "an_fft_and_complex_weights": ("bf16_mixed", SPECTRAL),
    "an_fft_that_is_40_percent": (
        "bf16_mixed",
        island("nn.Linear(8, 8)", "torch.fft.ifft2(torch.fft.fft2(h.view(16, 64, 64))).abs()", size=4096),
    ),
    "a_complex_layer": (
        "bf16_mixed",
        island("nn.Linear(32, 32, dtype=torch.complex64)", "s.island(h.to(torch.complex64)).abs()"),
    ),
    "orthogonal_weights": ("bf16_mixed", ORTHOGONAL),
    "distances": ("bf16_mixed", DISTANCES),
    "statistics_in_hooks": ("bf16_mixed", STATISTICS_IN_HOOKS),
    "lbfgs_with_a_closure": ("bf16_mixed", CLOSURE),
    "training_in_a_thread": ("bf16_mixed", THREAD),
    "loader_with_workers": ("bf16_mixed", WORKERS),
}
