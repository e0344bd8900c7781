"""`is_causal` in compiled models of transformers: the same decisions, and the same numbers, as in eager code.

Dynamo's graphs show what the kernels take. They are run as they are, so that losses and gradients are equal bit by bit;
one test compiles with Inductor, whose own rounding differs.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the real library runs here")
transformers = pytest.importorskip("transformers", reason="the real library runs here")

from packaging.version import Version
from torch import nn
from transformers import masking_utils

from mpguard.nn import attention
from mpguard.runtime.patches import table
from mpguard.runtime.proof.attention_masks import kernels_in_graph

LENGTH = 12
IDS = torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(0))
ONES = torch.ones_like(IDS)
PADDED = torch.cat([torch.zeros(2, 4), torch.ones(2, LENGTH - 4)], dim=1).long()
PACKED = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(2, -1)

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 64, "use_cache": False, "attn_implementation": "sdpa", "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
GPT2 = {
    "vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "use_cache": False,
    "attn_implementation": "sdpa", "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

#: Architecture -> model, config, and what attention takes in eager code without padding.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "Llama": ("ForCausalLM", GROUPED, {"is_causal"}),
    "Mistral": ("ForCausalLM", {**GROUPED, "sliding_window": None}, {"is_causal"}),
    "Qwen2": ("ForCausalLM", GROUPED, {"is_causal"}),
    "Qwen3": ("ForCausalLM", {**GROUPED, "head_dim": 8}, {"is_causal"}),
    "Gemma2": ("ForCausalLM", {**GROUPED, "head_dim": 8, "attn_implementation": "eager"}, set()),
    "Gemma3Text": (
        "Gemma3ForCausalLM",
        {**GROUPED, "head_dim": 8, "num_hidden_layers": 2, "sliding_window": 8,
         "layer_types": ["full_attention", "sliding_attention"]},
        {"is_causal", "mask"},
    ),
    "GPT2": ("LMHeadModel", GPT2, {"is_causal"}),
    "GPTNeoX": ("ForCausalLM", SIZES, {"is_causal"}),
    "Phi": ("ForCausalLM", GROUPED, {"is_causal"}),
    "Falcon": ("ForCausalLM", SIZES, {"mask"}),
    "OPT": ("ForCausalLM", {**SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}, {"is_causal"}),
    "Mixtral": ("ForCausalLM", {**GROUPED, "num_local_experts": 2, "sliding_window": None}, {"is_causal"}),
    "Olmo2": ("ForCausalLM", GROUPED, {"is_causal"}),
    "Cohere": ("ForCausalLM", GROUPED, {"is_causal"}),
}  # fmt: skip

#: What transformers 5.0 has of its own: Falcon makes its mask itself, layer drop and experts branch on tensors.
NOT_IN_OLD = ("Falcon", "OPT", "Mixtral") if Version(transformers.__version__) < Version("5.17") else ()


def made(architecture: str, **changes: Any) -> nn.Module:
    """Return a model that trains."""
    name, sizes, _ = ARCHITECTURES[architecture]
    config = getattr(transformers, f"{architecture}Config")(**{**sizes, **changes})
    torch.manual_seed(0)
    kind = name if hasattr(transformers, name) else architecture + name
    model: nn.Module = getattr(transformers, kind)(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


@dataclasses.dataclass
class Compiled:
    """A compiled model, and what attention takes in the graphs that were compiled since `kinds` was called."""

    model: nn.Module
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    found: Counter[str] = dataclasses.field(default_factory=Counter)

    def __post_init__(self) -> None:
        def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
            self.found += kernels_in_graph(graph)
            return graph.forward  # type: ignore[no-any-return]

        torch._dynamo.reset()
        self.call = torch.compile(self.model, backend=backend, **self.options)

    def kinds(self) -> set[str]:
        found, self.found = set(self.found), Counter()
        return found

    def check(self, *, exact: bool = True, **inputs: Any) -> set[str]:
        """Train one step compiled and one eager: both have the same loss and gradients. Return `kinds`.

        exact: False where compiled code gets a mask and eager code does not: torch's kernels round differently.
        """
        inputs.setdefault("input_ids", IDS)
        inputs.setdefault("labels", inputs["input_ids"])
        results = []
        for call in (self.call, self.model):
            self.model.zero_grad()
            loss = call(**inputs).loss
            loss.backward()
            own = self.model.named_parameters()
            results.append((loss.detach(), {name: each.grad.clone() for name, each in own if each.grad is not None}))
        (loss, gradients), (eager_loss, eager_gradients) = results
        tolerances = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(loss, eager_loss, **tolerances)
        torch.testing.assert_close(gradients, eager_gradients, **tolerances)
        return self.kinds()


@pytest.fixture(autouse=True)
def fixed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Apply the patches that concern attention, for one test."""
    chosen = [each for each in table.PATCHES if "(S38)" in each.reason]
    assert len(chosen) == 7
    for patch in chosen:
        owner: Any = sys.modules[patch.module] if patch.module in sys.modules else __import__(patch.module)
        *path, name = patch.target.split(".")
        for part in path:
            owner = getattr(owner, part)
        original = getattr(owner, name)
        wrapped = patch.wrap(original)
        monkeypatch.setattr(owner, name, wrapped)
        for module in list(sys.modules.values()):
            if not path and vars(module).get(name) is original:
                monkeypatch.setattr(module, name, wrapped)
    yield
    attention.switch(True)
    torch._dynamo.reset()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_takes_what_it_takes_in_eager_code(architecture: str) -> None:
    if architecture in NOT_IN_OLD:
        pytest.skip("its code in transformers 5.0 is not one graph, or makes the mask itself")
    model = Compiled(made(architecture), {"fullgraph": architecture != "GPT2"})  # which logs
    expected = ARCHITECTURES[architecture][2]
    assert model.check() == expected
    assert model.check(attention_mask=ONES.clone()) == expected
    assert model.check(attention_mask=PADDED) == ({"mask"} if expected - {"mask"} else set()), "else the same program"


def test_position_ids_are_dropped_only_if_the_graph_shows_that_they_count_up() -> None:
    model = Compiled(made("Llama"))
    assert model.check(position_ids=PACKED) == {"mask"}
    assert model.check(position_ids=PACKED.clone(), attention_mask=ONES.clone()) == {"is_causal"}, "as eager code does"
    counted = torch.arange(LENGTH)[None].expand(2, -1)
    assert model.check(position_ids=counted, exact=False) == set(), "the same program: values are not read"
    four = torch.ones(LENGTH, LENGTH).tril().bool().expand(2, 1, -1, -1).clone()
    four[:, :, 3, 1] = False
    assert model.check(attention_mask=four) == {"mask"}


@pytest.mark.parametrize("packed", [False, True])
def test_masks_are_eager_where_the_loop_over_blocks_is(packed: bool) -> None:
    """As under FSDP2: a hook of each block, which dynamo cannot trace, leaves the loop around it to eager code."""
    model = Compiled(made("Llama"))
    for block in model.model.model.layers:  # type: ignore[union-attr]
        block.register_forward_pre_hook(torch.compiler.disable(lambda _module, _inputs: None))
    assert model.check(**({"position_ids": PACKED} if packed else {})) == ({"mask"} if packed else {"is_causal"})


class Counting(nn.Module):
    """A script's own model around one of transformers, which makes the position ids."""

    def __init__(self, model: nn.Module, positions: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.positions = model, positions

    def forward(self, input_ids: Any, labels: Any) -> Any:
        return self.model(input_ids=input_ids, labels=labels, position_ids=self.positions(input_ids))


def written(ids: Any) -> Any:
    counted = torch.arange(LENGTH)[None].expand(2, -1).clone()
    counted[:, 6:] -= 6
    return counted


def written_through_a_view(ids: Any) -> Any:
    counted = torch.arange(LENGTH)[None].repeat(2, 1)
    counted[:, 6:].sub_(6)
    return counted


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (lambda ids: torch.arange(3, 3 + ids.shape[1])[None].expand(2, -1), "is_causal"),
        (lambda ids: torch.arange(ids.shape[1]).view(1, -1).repeat(2, 1).to(torch.int32).long() + 1, "is_causal"),
        (lambda ids: torch.arange(LENGTH).expand(3, 2, -1)[0], "is_causal"),
        (lambda ids: (ids > 3).cumsum(-1), "mask"),
        (lambda ids: torch.arange(0, 2 * LENGTH, 2)[None], "mask"),
        (lambda ids: torch.arange(LENGTH)[None] + (ids > 20).long(), "mask"),
        (lambda ids: torch.arange(2 * LENGTH).view(2, LENGTH)[:, :1].expand(-1, LENGTH), "mask"),
        (lambda ids: torch.arange(LENGTH).flip(0)[None], "mask"),
        (lambda ids: torch.arange(LENGTH)[ids.argsort(-1)], "mask"),
        (lambda ids: 20 - torch.arange(LENGTH)[None], "mask"),
        (written, "mask"),
        (written_through_a_view, "mask"),
    ],
)
def test_position_ids_that_a_script_makes(positions: Callable[[Any], Any], expected: str) -> None:
    assert Compiled(Counting(made("Llama"), positions)).check() == {expected}


def test_sizes_that_change_windows_and_caches() -> None:
    model = Compiled(made("Llama", use_cache=True), {"dynamic": True})
    assert model.check(attention_mask=ONES.clone()) == {"is_causal"}
    assert model.check(input_ids=IDS[:, :7].clone(), attention_mask=ONES[:, :7].clone()) == set(), "the same program"
    window = Compiled(made("Mistral", sliding_window=8), {"dynamic": True})
    assert window.check() == {"mask"}
    assert window.check(input_ids=IDS[:, :7].clone()) == {"is_causal"}, "shorter than the window"
    assert window.check(input_ids=IDS[:, :8].clone()) == set(), "as long as the window: the first program"


def test_a_mask_is_read_while_most_batches_have_no_padding() -> None:
    model = made("Llama")
    compiled = Compiled(model)
    ones = ONES.clone()
    assert compiled.check(attention_mask=ones) == {"is_causal"}
    assert compiled.check(attention_mask=PADDED) == {"mask"}
    assert compiled.check(attention_mask=ONES.clone()) == set(), "both programs are there"
    ones[:, :4] = 0
    assert compiled.check(attention_mask=ones) == set(), "the same tensor, with padding"
    del ones._mpguard_all_ones

    def loss(mask: Any) -> Any:
        return model(input_ids=IDS, labels=IDS, attention_mask=mask).loss

    assert torch.equal(torch.compile(loss, backend="eager")(ones), loss(ones)), "the mask is not read in this call"
    for _ in range(3):
        compiled.check(attention_mask=PADDED)
    again = ONES.clone()
    assert compiled.check(attention_mask=again, exact=False) == set()
    assert again._mpguard_all_ones is False, "not read any more"
    model.eval()
    compiled.check(attention_mask=again, exact=False)
    assert not hasattr(again, attention.MARK)


def test_a_first_batch_with_padding_does_not_decide_for_the_run() -> None:
    compiled = Compiled(made("Llama"))
    assert compiled.check(attention_mask=PADDED.clone()) == {"mask"}
    assert compiled.check(attention_mask=ONES.clone()) == {"is_causal"}
    assert compiled.check(attention_mask=PADDED.clone()) == set(), "both programs are there"


def test_masks_on_which_no_code_depends_are_read_only_at_first() -> None:
    sizes = {**SIZES, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    encoder = Compiled(transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).train())
    decoder = Compiled(made("Llama"))
    marks: dict[str, list[bool]] = {"encoder": [], "decoder": []}
    for _ in range(attention.FIRST_MASKS + 2):
        for name, model in (("encoder", encoder), ("decoder", decoder)):
            mask = ONES.clone()
            model.call(input_ids=IDS, labels=IDS, attention_mask=mask)
            marks[name].append(mask._mpguard_all_ones)
    assert marks == {"encoder": [True] * attention.FIRST_MASKS + [False] * 2, "decoder": [True] * len(marks["decoder"])}


def test_other_implementations_of_attention_get_what_they_got(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("eager", "flex_attention"):
        seen = []
        for on in (True, False):
            attention.switch(on)
            graphs: list[str] = []

            def backend(graph: Any, _inputs: Any, graphs: list[str] = graphs) -> Any:
                graphs.append(str(graph.graph))
                return graph.forward

            torch._dynamo.reset()
            model = made("Llama", attn_implementation=name).eval()
            model.compile(backend=backend)
            with torch.no_grad():
                model(input_ids=IDS, attention_mask=ONES.clone())
            seen.append(graphs)
        assert seen[0] == seen[1], name


def test_attention_that_a_script_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def own_mask(*args: Any, **given: Any) -> Any:
        return masking_utils.sdpa_mask(*args, **{**given, "allow_is_causal_skip": False})

    monkeypatch.setitem(AttentionInterface._global_mapping, "own", sdpa_attention_forward)
    monkeypatch.setitem(masking_utils.AttentionMaskInterface._global_mapping, "own", own_mask)
    model = Compiled(made("Llama", attn_implementation="own"))
    assert model.check(attention_mask=ONES.clone()) == {"mask"}, "its mask function makes one in eager code too"
    assert model.check(attention_mask=PADDED) == set(), "the same program"


def test_models_without_causal_attention_and_encoder_decoders() -> None:
    small = {"use_cache": False, "vocab_size": 64, "pad_token_id": 0, "decoder_start_token_id": 1}
    bart = {
        **small, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "dropout": 0.0, "eos_token_id": 2,
        "max_position_embeddings": 64, "forced_eos_token_id": 2,
    }  # fmt: skip
    t5 = {**small, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    bert = {**SIZES, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    models = (  # with what they take where mpguard is switched off
        (transformers.BartForConditionalGeneration(transformers.BartConfig(**bart)), {"is_causal", "mask"}),
        (
            transformers.T5ForConditionalGeneration(transformers.T5Config(**t5)),
            {"mask"} if transformers.T5PreTrainedModel._supports_sdpa else set(),
        ),
        (transformers.BertForMaskedLM(transformers.BertConfig(**bert)), {"mask"}),
    )
    for model, kinds in models:
        assert Compiled(model.train()).check(attention_mask=ONES.clone()) == kinds, type(model).__name__
    states = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    decoder = Compiled(made("GPT2", add_cross_attention=True))
    # transformers 5.0 makes a mask of ones for the encoder's states.
    assert decoder.check(encoder_hidden_states=states) == {"is_causal", "mask" if NOT_IN_OLD else "neither"}
    padded = torch.tensor([[1, 1, 1, 1, 0]] * 2)
    assert decoder.check(encoder_hidden_states=states, encoder_attention_mask=padded) == {"is_causal", "mask"}


def of_5_0(
    padding_mask: Any, query_length: int, kv_length: int, kv_offset: int, local_attention_size: Any = None
) -> bool:
    return False


def of_5_17(
    padding_mask: Any, q_length: int, kv_length: int, q_offset: int, kv_offset: int, local_attention_size: Any = None
) -> bool:
    return False


@pytest.mark.parametrize(("original", "offsets"), [(of_5_0, (0,)), (of_5_17, (0, 0))])
def test_the_parameters_of_the_versions_that_differ(original: Callable[..., bool], offsets: tuple[int, ...]) -> None:
    """transformers renamed the number of queries between 5.0 and 5.17, and added their offset."""
    wrapped = attention.skip_causal_mask(original)

    def skips(states: Any, queries: int, window: int | None) -> Any:
        given = {"local_attention_size": window}
        return states + int(wrapped(None, queries, LENGTH, *offsets, **given))

    compiled = torch.compile(skips, backend="eager", fullgraph=True)
    zero = torch.zeros(())
    decisions = {
        (queries, window): int(compiled(zero, queries, window)) for queries in (LENGTH, 5) for window in (None, 8)
    }
    assert decisions == {(LENGTH, None): 1, (LENGTH, 8): 0, (5, None): 0, (5, 8): 0}
    assert int(skips(zero, LENGTH, None)) == 0, "eager code decides itself"


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = made("Llama", num_hidden_layers=2)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    compiled = Compiled(model)
    assert compiled.check(attention_mask=ONES.clone()) == {"is_causal"}
    assert compiled.check(attention_mask=PADDED) == {"mask"}


def test_lora_and_generation_during_training() -> None:
    peft = pytest.importorskip("peft")
    model = made("Llama", use_cache=True)
    lora = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    )
    compiled = Compiled(lora.train())
    assert compiled.check(attention_mask=ONES.clone()) == {"is_causal"}

    model = made("Llama", use_cache=True)
    wanted = model.generate(IDS, attention_mask=PADDED, max_new_tokens=4, do_sample=False)
    torch._dynamo.reset()
    model.compile(backend="eager")
    model(input_ids=IDS, labels=IDS, attention_mask=ONES.clone()).loss.backward()
    assert torch.equal(model.generate(IDS, attention_mask=PADDED, max_new_tokens=4, do_sample=False), wanted)
    for inputs in ({"attention_mask": ONES.clone()}, {}):
        generated = model.generate(IDS, max_new_tokens=4, do_sample=False, **inputs)
        assert generated.shape == (2, LENGTH + 4)


def test_overridden_mask_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = made("Gemma3Text", use_bidirectional_attention=True)
    assert Compiled(everything).check(attention_mask=ONES.clone()) == {"mask"}
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    original = masking_utils.create_causal_mask

    def own(**given: Any) -> Any:
        return original(**given, and_mask_function=lambda b, h, q, k: (q - k) < 4)

    monkeypatch.setattr(llama, "create_causal_mask", own)
    assert Compiled(made("Llama")).check(attention_mask=ONES.clone()) == {"mask"}


def test_a_failure_of_its_own_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> Any:
        raise AttributeError("grapharg")

    monkeypatch.setattr(attention, "_chain", fails)
    model = Compiled(made("Llama"))
    assert model.check(exact=False) == {"mask"}
    assert model.check(attention_mask=ONES.clone(), exact=False) == {"mask"}
    monkeypatch.setattr(attention, "_takes_is_causal", fails)
    assert Compiled(made("Llama")).check(attention_mask=ONES.clone(), exact=False) == {"mask"}


def test_an_exported_program_is_not_changed() -> None:
    model = made("Llama").eval()
    with torch.no_grad():
        program = torch.export.export(model, (IDS,), strict=True)
    taken = kernels_in_graph(program.graph_module)
    assert set(taken) <= {"mask"}, taken


def test_inductor_compiles_what_is_left() -> None:
    """Its kernels round differently from eager ones, with and without a mask: losses agree to 1e-5."""
    from torch._inductor.compile_fx import compile_fx

    found: Counter[str] = Counter()

    def backend(graph: Any, inputs: Any) -> Any:
        found.update(kernels_in_graph(graph))
        return compile_fx(graph, inputs)

    torch._dynamo.reset()
    model = made("Llama")
    inputs = {"input_ids": IDS, "labels": IDS, "attention_mask": ONES.clone()}
    loss = torch.compile(model, backend=backend)(**inputs).loss
    loss.backward()
    gradients = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    eager = model(**inputs).loss
    eager.backward()
    assert set(found) == {"is_causal"}
    torch.testing.assert_close(loss, eager, rtol=1e-5, atol=0.0)
    torch.testing.assert_close(gradients, [each.grad for each in model.parameters()], rtol=1e-4, atol=1e-6)
