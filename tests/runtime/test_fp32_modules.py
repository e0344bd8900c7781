"""`fp32_modules` with the real engines: what torch's functions got shows that norms and the head compute in FP32."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the real library runs here")

from paths import PROGRAMS
from processes import in_fork, mp_yaml, proof, ranks_in_fork, results, transcript

import mpguard
from mpguard.nn import fp32
from mpguard.nn.fp8 import filters
from mpguard.targets.capabilities import require_supported

PROGRAM = PROGRAMS / "fp32_modules.py"
FIELD = "mpguard_overrides: {fp32_modules: ['*norm', lm_head]}"

HELD = ", from weights that {} holds in bf16"
FSDP1, FSDP2 = ("FSDP", {"fsdp_config": "{fsdp_version: 1}"}), ("FSDP", {"fsdp_config": "{fsdp_version: 2}"})

#: Words of the program -> the config, and what the proof says about the weights.
ENGINES: dict[str, tuple[str, dict[str, str], str]] = {
    "plain --checkpoint --tied": ("'NO'", {}, ""),
    "plain --compile": ("'NO'", {}, ""),
    "accelerate": ("'NO'", {}, ""),
    "ddp": ("MULTI_CPU", {}, ""),
    "fsdp1": (*FSDP1, ""),
    "fsdp1 --wrap class --flat --checkpoint": (*FSDP1, ""),
    "fsdp1 --wrap size": (*FSDP1, ""),
    "fsdp2 --compile": (*FSDP2, ""),
    "fsdp2 --tied --checkpoint": (*FSDP2, HELD.format("fsdp2")),
    "zero2": (
        "DEEPSPEED",
        {"deepspeed_config": "{zero_stage: 2}"},
        HELD.format("deepspeed-zero2"),
    ),
    "zero3": (
        "DEEPSPEED",
        {"deepspeed_config": "{zero_stage: 3}"},
        HELD.format("deepspeed-zero3"),
    ),
}


def run(folder: Path, words: str, recipe: str = "bf16_mixed", field: str = FIELD) -> tuple[Any, dict[str, Any]]:
    kind, keys, _ = ENGINES.get(words, ENGINES["plain --compile"])
    processes = 1 if kind == "'NO'" else 2
    own = f"{{mpguard_recipe: {recipe}, {field}}}"
    config = mp_yaml(folder, distributed_type=kind, num_processes=processes, fp8_config=own, **keys)
    arguments = ["--config", config, "--proof-json", folder / "proof.json", PROGRAM, *words.split()]
    if processes == 1:
        ended = in_fork(arguments, cwd=folder)
    else:
        ended = ranks_in_fork(arguments, cwd=folder, processes=processes)[0]
    return ended, dict(proof(folder / "proof.json")) if (folder / "proof.json").exists() else {}


@pytest.mark.parametrize("words", ENGINES)
def test_norms_and_the_head_compute_in_fp32_in_every_engine(tmp_path: Path, words: str) -> None:
    ended, made = run(tmp_path, words)
    assert ended.returncode == 0, transcript(ended)
    (found,) = results(ended)
    compiled = "--compile" in words
    assert found["logits"] == "torch.float32" and found["names"] == [], "names of parameters do not change"
    if not compiled:
        assert found["norm"] == ["float32 float32 float32 float32"], transcript(ended)
        assert found["head"] == ([] if words == "zero3" else ["float32 float32 float32"]), transcript(ended)
        assert all(each.startswith("bfloat16") for each in found["other"]), "the others as before"
    row = made["rows"]["fp32 modules"]
    assert row["found"] == f"fp32 (blocks.0.norm, blocks.1.norm, norm and 1 more){ENGINES[words][2]}"
    assert row["ok"] is True and made["verdict"] == "in force"
    assert made["observed"]["fp32"]["computed"] == {"fp32": ["blocks.0.norm", "blocks.1.norm", "norm", "lm_head"]}
    weights = made["observed"]["fp32"]["weights"]
    assert weights and ("bf16" in weights) is bool(ENGINES[words][2])


def test_parameters_stay_fp32_in_a_bf16_model(tmp_path: Path) -> None:
    ended, made = run(tmp_path, "plain --half", recipe="bf16_full")
    (found,) = results(ended)
    assert ended.returncode == 0 and made["verdict"] == "in force", transcript(ended)
    assert found["norm"] == ["float32 float32 float32 float32"] and found["other"] == ["bfloat16 " * 3 + "bfloat16"]
    assert made["observed"]["masters"].keys() == {"bf16", "fp32"}


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    ended, made = run(tmp_path, "plain", field="mpguard_overrides: {fp32_modules: ['*norm', '*router*']}")
    assert ended.returncode == 1, transcript(ended)
    assert "not in force: fp32 modules: *router* matches no module; asked: a pattern that matches" in ended.stderr
    assert made["observed"]["fp32"]["unmatched"] == ["*router*"]


@pytest.mark.parametrize(
    ("gate", "late", "message"),
    [
        ("Lowering()", "", "fp32 modules: bf16 (gate); asked: fp32"),
        (
            "nn.Linear(32, 32)",
            "net.gate.forward = lambda x: nn.functional.linear(x, net.gate.weight)",
            "fp32 modules: bf16 (gate); asked: fp32. Other code multiplies by the weight of gate",
        ),
        ("nn.Identity()", "net.gate = nn.Linear(32, 32)", "fp32 modules: gate not in fp32; asked: fp32: add modules"),
    ],
)
def test_modules_that_are_not_in_fp32_are_refused(tmp_path: Path, gate: str, late: str, message: str) -> None:
    script = f"""
import torch
from torch import nn
class Lowering(nn.Linear):
    def __init__(s): super().__init__(32, 32)
    def forward(s, x):
        with torch.autocast("cpu", torch.bfloat16): return super().forward(x)
net = nn.Sequential()
net.body, net.gate, net.last = nn.Linear(32, 32), {gate}, nn.Linear(32, 320)
o = torch.optim.AdamW(net.parameters())
{late}
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16): loss = net(torch.randn(16, 32)).sum()
    loss.backward(); o.step(); o.zero_grad()
"""
    (tmp_path / "t.py").write_text(script)
    own = "{mpguard_recipe: bf16_mixed, mpguard_overrides: {fp32_modules: [gate]}}"
    ended = in_fork(["--config", mp_yaml(tmp_path, fp8_config=own), "t.py"], cwd=tmp_path)
    assert ended.returncode == 1 and f"mpguard: not in force: {message}" in ended.stderr, transcript(ended)


def test_an_island_of_the_script_is_allowed_by_name(tmp_path: Path) -> None:
    """The head is most of the work here; the same run without `allow` is refused, and says how to allow it."""
    script = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(s): super().__init__(); s.body, s.head = nn.Linear(32, 32), nn.Linear(32, 320)
    def forward(s, x):
        x = s.body(x)
        with torch.autocast("cpu", enabled=False): return s.head(x.float())
net = Net(); o = torch.optim.AdamW(net.parameters())
for _ in range(2):
    with torch.autocast("cpu", torch.bfloat16): loss = net(torch.randn(16, 32)).sum()
    loss.backward(); o.step(); o.zero_grad()
"""
    (tmp_path / "t.py").write_text(script)
    words = ["--config", mp_yaml(tmp_path), "--proof-json", tmp_path / "proof.json"]
    refused = in_fork([*words, "t.py"], cwd=tmp_path)
    assert refused.returncode == 1 and "mpguard_allow: [{fp32: head}]" in refused.stderr, transcript(refused)
    allowed = in_fork([*words, "--allow", "fp32: head", "--allow", "frozen:fp16", "t.py"], cwd=tmp_path)
    assert allowed.returncode == 0 and "allowed: fp32: head" in allowed.stderr, transcript(allowed)
    rows = proof(tmp_path / "proof.json")["rows"]
    assert (rows["compute"]["ok"], rows["compute"]["allowed"]) == (None, "fp32: head")
    assert rows["allow"]["found"] == "not needed: frozen: fp16"


def test_it_is_refused_where_deepspeed_would_keep_no_exact_weights() -> None:
    policy = mpguard.recipe("bf16_full").replace(fp32_modules=["*norm"])
    require_supported("accelerate", policy, "fsdp2")
    with pytest.raises(mpguard.PolicyError, match=r"DeepSpeed casts all parameters to bf16.*fp32_modules: \[\]"):
        require_supported("accelerate", policy, "deepspeed-zero2")
    with pytest.raises(mpguard.PolicyError, match=r"fp32_modules.*needs bf16 or fp16"):
        mpguard.Policy(fp32_modules=["*norm"])
    with pytest.raises(mpguard.PolicyError, match="fp32_modules is 'norm'; it must be a list of texts"):
        mpguard.Policy(bf16=True, fp32_modules="norm")


# -- one module ----------------------------------------------------------------------------------

POLICY = mpguard.recipe("bf16_mixed").replace(fp32_modules=["norm", "gate", "rope"])


class Rope(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", torch.tensor([1.0, 0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x[..., None] * self.inverse).cos().to(x.dtype)


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.body = torch.nn.LayerNorm(8), torch.nn.Linear(8, 4), torch.nn.Linear(8, 8)
        self.rope = Rope()


@pytest.fixture
def small() -> Iterator[Small]:
    yield Small()


def test_the_output_is_what_the_surroundings_need(small: Small) -> None:
    """Without autocast the next matmul has BF16 weights; logits of a router and autocast's own operators stay FP32."""
    policy = POLICY.replace(fp32_modules=["norm", "*.gate", "gate", "rope"])
    assert fp32.keep(list(small.named_modules()), policy) == []
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    assert small.norm(x).dtype == small.rope(x).dtype == torch.bfloat16
    assert small.norm(x.float()).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert small.norm(x).dtype == small.gate(x).dtype == torch.float32
        assert small.body(x).dtype == torch.bfloat16


def test_low_weights_are_cast_for_the_call_and_get_gradients(small: Small) -> None:
    """As under DeepSpeed, which casts the parameters after `keep`."""
    fp32.keep(list(small.named_modules()), POLICY)
    small.to(torch.bfloat16)
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    out = small.norm(x)
    exact = torch.nn.functional.layer_norm(x.float(), (8,), small.norm.weight.float(), small.norm.bias.float())
    assert torch.equal(out, exact.bfloat16())
    out.sum().backward()
    assert small.norm.weight.grad is not None and small.norm.weight.grad.dtype == torch.bfloat16
    assert small.norm.weight.dtype == torch.bfloat16 and "weight" not in vars(small.norm)


def test_rounded_buffers_are_named_and_shared_parameters_are_left(small: Small) -> None:
    small.gate.weight = torch.nn.Parameter(torch.zeros(4, 8))
    small.body.weight = small.gate.weight
    small.to(torch.bfloat16)
    assert fp32.keep(list(small.named_modules()), POLICY) == ["rope.inverse"]
    assert small.norm.weight.dtype == small.rope.inverse.dtype == torch.float32
    assert small.gate.weight.dtype == torch.bfloat16 and small.gate(torch.randn(2, 8)).dtype == torch.float32
    assert [name for _, name, _ in fp32.separable(small)] == ["norm"], "FSDP shards a shared weight with its other user"


def test_copies_and_pickles_have_their_own_weights(small: Small) -> None:
    """A copy of the model (an average of its weights) must not compute with the weights of the first."""
    fp32.keep(list(small.named_modules()), POLICY)
    other = copy.deepcopy(small)
    with torch.no_grad():
        other.norm.weight.zero_()
        other.norm.bias.zero_()
    x = torch.randn(2, 8)
    assert other.norm(x).abs().sum() == 0 and small.norm(x).abs().sum() > 0
    loaded = pickle.loads(pickle.dumps(small.norm))
    assert torch.equal(loaded(x), small.norm(x)) and small.state_dict().keys() == Small().state_dict().keys()


def test_convert_and_revert(small: Small) -> None:
    """In a loop of one's own that activates no policy."""
    policy = mpguard.Policy(bf16=True, fp8="hybrid", backend="torchao", fp8_emulate=True, fp32_modules=["gate", "norm"])
    small.gate, small.body = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    done = mpguard.convert(small, policy)
    assert done.converted == ("body",) and ("gate", "fp32_modules") in done.skipped
    with torch.autocast("cpu", torch.bfloat16):
        assert small.gate(torch.randn(16, 16)).dtype == torch.float32
        assert mpguard.revert(small).gate(torch.randn(16, 16)).dtype == torch.bfloat16  # type: ignore[operator, union-attr]
    assert "forward" not in vars(small.norm) and small.state_dict().keys() == Small().state_dict().keys()
    with pytest.raises(mpguard.PolicyError, match="fp32_modules: `rotary` matches no module"):
        mpguard.convert(small, policy.replace(fp32_modules=["rotary"]))


def test_such_modules_stay_out_of_fp8(small: Small) -> None:
    policy = mpguard.recipe("bf16_with_fp8_current_scaling_mixed").replace(fp32_modules=["bod*"], fp8_exclude=[])
    assert filters.reasons(list(small.named_modules()), policy)[id(small.body)] == "fp32_modules"
    assert filters.pattern_around("layers.0.norm.inner", ["layers.*.norm"]) == "layers.*.norm"
    assert filters.pattern_around("norms.0", ["norm"]) is None and filters.pattern_around("", ["*"]) is None


def test_a_model_of_transformers_under_its_trainer(tmp_path: Path) -> None:
    """Norms of queries and keys, rotary embeddings and a router: attention and experts accept what they return."""
    pytest.importorskip("transformers", minversion="5.2", reason="before, experts call torch's operator themselves")
    script = """
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments
model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
))
seen = {}
def note(name):
    def hook(module, inputs, output): seen[name] = (output[0] if type(output) is tuple else output).dtype
    return hook
for name in ("lm_head", *(f"model.layers.0.{each}" for each in ("mlp.gate", "self_attn.q_norm", "self_attn.q_proj"))):
    model.get_submodule(name).register_forward_hook(note(name))
data = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 4
more = {"use_cpu": True, "max_steps": 2, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
Trainer(model=model, args=TrainingArguments(output_dir="out", **more), train_dataset=data).train()
print("SEEN", *(f"{name.split('.')[-1]}={dtype}" for name, dtype in seen.items()))
"""
    (tmp_path / "t.py").write_text(script)
    own = "{mpguard_recipe: bf16_mixed, mpguard_overrides: {fp32_modules: ['*norm', '*rotary*', '*.gate', lm_head]}}"
    ended = in_fork(
        ["--config", mp_yaml(tmp_path, fp8_config=own), "--proof-json", tmp_path / "proof.json", "t.py"], cwd=tmp_path
    )
    assert ended.returncode == 0, transcript(ended)
    seen = set(next(line for line in ended.stdout.splitlines() if line.startswith("SEEN")).split()[1:])
    fp32_names = {f"{name}=torch.float32" for name in ("gate", "q_norm", "lm_head")}
    assert seen == fp32_names | {"q_proj=torch.bfloat16"}, transcript(ended)
    observed = proof(tmp_path / "proof.json")["observed"]["fp32"]
    assert observed["computed"].keys() == {"fp32"} and observed["idle"] == observed["left"] == []
