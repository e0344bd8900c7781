"""Run the fixed examples of the rules about loss scaling on the CPU: they must train, and as without a scaler.

Names that an example does not define (`model`, `loader`, `optimizer`) are small stand-ins, as are the parameters of its
functions. The scalers are torch's own, on the CPU; autocast does nothing; a step zeroes the gradients.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rule_cases
from rule_cases import named_examples

from mpguard.lint.model.rule import Bad, BaseRule, rules
from mpguard.lint.model.rule_page import unmarked
from mpguard.lint.model.selection import Selectors
from mpguard.lint.run.engine import Engine, Options
from mpguard.lint.source.files import Target

torch = pytest.importorskip("torch", reason="the programs train with torch")

#: Needs a process group and an accelerator, or a module that the example does not have.
_UNRUNNABLE = ("FullyShardedDataParallel", "diffusers", "from elsewhere import")


def _runs(example: Bad) -> bool:
    """True if an example is a program of one file, with libraries that are here."""
    modules = [name for name in example.files if name.endswith(".py")]
    return not modules and not any(each in example.code for each in _UNRUNNABLE)


RULES = rules(own_only=True)
EXAMPLES = [
    pytest.param(rule, example, id=name)
    for rule, example, name in named_examples({code: rule for code, rule in RULES.items() if code.startswith("MPG2")})
    if isinstance(example, Bad) and rule_cases.expected_difference(example) is not None and _runs(example)
]


def fixed_by(rule: type[BaseRule], example: Bad, folder: Path) -> str:
    """Return what the rule's fixes make of an example; `test_examples` compares it with what the example says."""
    path = rule_cases.write(rule, example, folder)
    engine = Engine(RULES, Options(Selectors(select=(rule.code,)), fix="unsafe"))
    (report,) = engine.run([Target(str(path), "python", named=True)])
    assert report.fix_result is not None
    return report.fix_result.after.decode()


@pytest.fixture(autouse=True)
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def nothing(*_: object, **__: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    for module in (torch, torch.amp, torch.cuda.amp):
        monkeypatch.setattr(module, "autocast", nothing)
    for kind in (torch.Tensor, torch.nn.Module):
        monkeypatch.setattr(kind, "cuda", lambda self, *_: self)
    optimizers = importlib.import_module("torch.optim.optimizer")
    hook = optimizers.register_optimizer_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
    yield
    hook.remove()


class Model(torch.nn.Linear):  # type: ignore[misc, name-defined]
    """A model whose output is a loss already."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(8, 8)

    def forward(self, x: object) -> Any:
        return super().forward(torch.ones(2, 8) if x is None else torch.ones(2, 8) * x).pow(2).mean()


def run(code: str, scaled: bool, amp: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a program and each of its functions; return the error, or the weights, of each.

    scaled: False disables the scalers that the program makes. amp: the value of its flags for mixed precision.
    """
    scaler_class = torch.amp.grad_scaler.GradScaler

    def scaler(*given: Any, enabled: bool = True, **_: Any) -> Any:
        scales = [each for each in given if isinstance(each, float)]
        return scaler_class("cpu", *scales, enabled=bool(enabled) and scaled)

    for module in (torch.amp, torch.cuda.amp):
        monkeypatch.setattr(module, "GradScaler", scaler)
    results: dict[str, Any] = {}
    names = _stand_ins(code, scaler, amp)
    try:
        exec(compile(code, "<example>", "exec"), names)
    except Exception as error:
        return {"<module>": f"{type(error).__name__}: {error}"}
    results["<module>"] = _weights(names)
    for name, call in _entry_points(names):
        given = _stand_ins(code, scaler, amp)
        try:
            call(given)
        except KeyError:
            continue  # a parameter without a stand-in
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        else:
            results[name] = _weights(given)
    return results


def _entry_points(names: dict[str, Any]) -> Iterator[tuple[str, Callable[[dict[str, Any]], object]]]:
    """Yield the functions of a program, and the methods that train, with a call that takes the stand-ins."""

    def arguments(function: Callable[..., object], given: dict[str, Any]) -> list[Any]:
        return [given[each] for each in inspect.signature(function).parameters]

    for name, value in list(names.items()):
        if isinstance(value, types.FunctionType) and value.__code__.co_filename == "<example>":
            yield name, lambda given, function=value: function(*arguments(function, given))
        method = getattr(value, "run", None) if isinstance(value, type) and value.__module__ == "example" else None
        if method is not None:

            def train(given: dict[str, Any], kind: Any = value) -> None:
                instance = kind(*arguments(kind, given))
                instance.run(*arguments(instance.run, given))

            yield f"{name}.run", train


def _stand_ins(code: str, scaler: Any, amp: bool) -> dict[str, Any]:
    model, other = Model(0), Model(1)
    one, two = torch.optim.SGD(model.parameters(), 0.01), torch.optim.SGD(other.parameters(), 0.01)
    batch = torch.ones(2, 8)
    pairs = any(each in code for each in ("for x, y in", "(x, y)"))
    args = types.SimpleNamespace(amp=amp, fp16=amp, bf16=False, apex=False, accumulate=1, clip=1.0, one=one, two=two)
    models = {"model": model, "net": model, "generator": model, "other": other, "critic": other}
    optimizers = {"optimizer": one, "one": one, "two": two, "scaler": scaler()}
    data = {"loader": [(batch, batch) if pairs else batch] * 4, "x": batch, "batch": batch}
    options = {"args": args, "dtype": "float16", "epochs": 2, "amp": amp}
    return {
        **models,
        **optimizers,
        **data,
        **options,
        "losses": _losses(model),
        "loss": model(batch),
        "__name__": "example",
    }


def _losses(model: Model) -> Iterator[Any]:
    for _ in range(4):
        yield model(None)


def _weights(names: dict[str, Any]) -> Any:
    models = {id(each): each for each in names.values() if isinstance(each, torch.nn.Module)}
    return torch.cat([parameter.detach().flatten() for model in models.values() for parameter in model.parameters()])


@pytest.mark.parametrize("amp", [True, False])
@pytest.mark.parametrize(("rule", "example"), EXAMPLES)
def test_fixed_program(
    rule: type[BaseRule], example: Bad, amp: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs wherever the example did, and trains the same weights as with its scalers disabled."""
    code, fixed = unmarked(example.code), fixed_by(rule, example, tmp_path)
    before = run(code, True, amp, monkeypatch)
    after = run(fixed, True, amp, monkeypatch)
    plain = run(fixed, False, amp, monkeypatch)
    for name, result in after.items():
        if isinstance(result, str):
            assert isinstance(before[name], str), f"{name}: {result}"
        elif not isinstance(plain[name], str):
            torch.testing.assert_close(result, plain[name], msg=lambda text, name=name: f"{name}: {text}")
    if amp:
        assert not all(isinstance(result, str) for result in after.values()), after


def test_the_stand_ins_see_a_wrong_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    right = (
        "def f(model, loader, optimizer, scaler):\n    for x in loader:\n        scaler.scale(model(x)).backward()\n"
    )
    step = "        scaler.step(optimizer)\n        scaler.update()\n"
    without = run(f"{right}{step}", False, True, monkeypatch)["f"]
    assert torch.allclose(run(f"{right}{step}", True, True, monkeypatch)["f"], without)
    twice = right.replace("model(x)", "scaler.scale(model(x))")
    assert not torch.allclose(run(f"{twice}{step}", True, True, monkeypatch)["f"], without)
    assert "update" in run(f"{right}{step}        scaler.update()\n", True, True, monkeypatch)["f"]
