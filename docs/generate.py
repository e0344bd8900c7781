"""Write the generated pages of docs/: rules, recipes, targets, command line, evidence and GPU results.

    python docs/generate.py            # write what differs; also the output that README.md shows of the linter
    python docs/generate.py --check    # write nothing; exit 1 if a page differs

Each page depends on the code, and on the result files in benchmarks/, and on nothing of the machine: neither its GPU
nor the installed libraries nor other distributions' plugins. tests/docs/test_generated.py compares the committed pages.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from mpguard import cli, targets
from mpguard.lint.model import rule_docs
from mpguard.policy import BACKENDS, EMULATED, Policy, hardware
from mpguard.policy.recipes import recipe, recipes
from mpguard.targets.settings import show

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
BENCHMARKS = DOCS.parent / "benchmarks"
NOTE = "<!-- Written by docs/generate.py. Do not edit: change the code that it reads, then run `make docs`. -->"

#: One GPU for each generation that a recipe can depend on.
GPUS = ("V100", "A100", "H100", "B200")

#: One GPU for each generation on which scaling recipes of FP8 differ.
FP8_GPUS = {"A100": "Ampere", "L40S": "Ada", "H100": "Hopper", "B200": "Blackwell", "RTX5090": "consumer Blackwell"}


def pages() -> dict[str, str]:
    """Return the generated pages: path below docs/ -> text."""
    evidence = _benchmark("evidence")
    rules = {
        name: f"{text.rstrip()}\n\n{evidence.of_rule(code)}" if (code := Path(name).stem).startswith("MPG") else text
        for name, text in rule_docs.pages().items()
    }
    return {
        **rules,
        "recipes.md": recipes_page(),
        "targets.md": targets_page(),
        "cli.md": cli_page(),
        "evidence.md": evidence.page(),
        "evidence_rules.md": evidence.rules_page(),
        **gpu_pages(),
    }


def readme(text: str) -> str:
    """Return the text of README.md with the current output of the commands between its `output of` comments."""

    def shown(match: re.Match[str]) -> str:
        command = match["command"]
        printed = io.StringIO()
        before = Path.cwd()
        os.chdir(DOCS.parent)  # contextlib.chdir is not in Python 3.10
        try:
            with contextlib.redirect_stdout(printed):
                cli.main([*command.split()[1:], "--no-cache"])
        finally:
            os.chdir(before)
        return (
            f"<!-- output of: {command} -->\n```console\n$ {command}\n{printed.getvalue()}```\n<!-- end of output -->"
        )

    return re.sub(r"<!-- output of: (?P<command>mpguard lint .*) -->\n(?:.*\n)*?<!-- end of output -->", shown, text)


def write(folder: Path, check: bool = False) -> list[str]:
    """Write the pages that differ, remove pages of rules that no longer exist, and return the names of all of these.

    check: only return the names.
    """
    wanted = pages()
    removed = [f"rules/{path.name}" for path in (folder / "rules").glob("*.md") if f"rules/{path.name}" not in wanted]
    differing = [
        name
        for name, text in wanted.items()
        if not (folder / name).exists() or (folder / name).read_text("utf-8") != text
    ]
    if not check:
        for name in removed:
            (folder / name).unlink()
        for name in differing:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(wanted[name], "utf-8")
    return sorted([*removed, *differing])


# -- recipes ----------------------------------------------------------------------------------------------------------


def recipes_page() -> str:
    """Return the page of the recipes that mpguard brings."""
    own = {name: function for name, function in recipes().items() if function.__module__.startswith("mpguard.")}
    rows = [["recipe", "compute", "FP8 or FP4", "master weights", "reduction", *GPUS]]
    sections = []
    for name, function in own.items():
        summary = " ".join(inspect.cleandoc(function.__doc__ or "").partition("\n\n")[0].split())
        if name == "auto":  # it depends on the machine
            rows.append(
                [f"[`{name}`](#{name})", "by hardware", "by hardware", "fp32", "by hardware", *["yes"] * len(GPUS)]
            )
            sections += [f"## {name}", summary, "`mpguard recipes auto` prints what it chooses on a machine, and why."]
            continue
        policy = recipe(name)
        rows.append([f"[`{name}`](#{name})", *_recipe_cells(policy)])
        fields = "\n".join(f"{field}: {show(value)}" for field, value in policy.settings().items())
        sections += [f"## {name}", summary, f"```yaml\n{fields}\n```"]
    return _page(
        "# Recipes",
        NOTE,
        "A recipe is a named policy. `mpguard init RECIPE` writes a config from one, `mpguard apply RECIPE FILE`"
        " changes existing configs, `mpguard.recipe(name)` returns the policy, and `mpguard recipes RECIPE --for"
        " TARGET` prints what it becomes in a framework. Names are those of Megatron Bridge where it has the recipe;"
        " `-` and `_` are the same in them.",
        "FP8 column: library and scaling recipe; `te` is Transformer Engine. GPU columns: `yes` if the GPU can run the"
        " recipe, provided that the library is installed and built for a recent CUDA version. Without a GPU, recipes"
        " without FP8 run in software, except for tf32; FP8 recipes need `fp8_emulate: true` and torchao.",
        "`fp8_param: auto`, `fp4_param: auto`: a wish, granted where the optimizer and the strategy can, else off and"
        " reported: [Parameters in FP8](fp8.md#parameters-in-fp8).",
        _table(rows),
        "## Scaling recipes",
        "What `fp8_recipe` and the entries of [`fp8_modules`](fp8.md#a-recipe-per-module) may name, with each library"
        " that has it. GPU columns: as above, for BF16 compute. In software: with `fp8_emulate: true`, or `mpguard"
        " launch --emulate`, on any GPU and on a CPU: the values of the hardware, not its speed. Sizes: features of a"
        " layer must be multiples of this, others stay in the compute dtype; rows are padded to it. `_with_gw_hp`: the"
        " product of the weight's gradient is in the compute dtype; `_with_bwd_hp`: the whole backward pass is.",
        _table(_scaling_rows()),
        "Any field can be changed under `fp8_config.mpguard_overrides` in mp.yaml, or with"
        ' `mpguard.recipe("bf16_mixed").replace(grad_reduce_in_fp32=False)`. The fields are described in the docstring'
        " of `mpguard.Policy`. Fields that are not listed below have their default values.",
        *sections,
    )


def _scaling_rows() -> Iterator[list[str]]:
    """Yield a row for each scaling recipe and library: its formats and sizes, the GPUs that run it, and software."""
    gpus = [f"{name} ({generation})" for name, generation in FP8_GPUS.items()]
    yield ["recipe", "library", "formats", "sizes", *gpus, "in software"]
    for recipe_name, backends in BACKENDS.items():
        for backend in backends:
            forms = ["e4m3"] if backend == "torchao" and recipe_name != "tensorwise" else []
            forms = ["e2m1"] if recipe_name == "nvfp4" else forms or ["hybrid", "e4m3"]
            low = {"fp4": "e2m1"} if recipe_name == "nvfp4" else {"fp8": forms[0], "fp8_recipe": recipe_name}
            policy = Policy.of({"bf16": True, "backend": backend, **low})
            able = ["no" if hardware.named(gpu).refuses(policy) else "yes" for gpu in FP8_GPUS]
            software = "yes" if backend == "torchao" and recipe_name in EMULATED else "no"
            sizes = str(hardware.needs_of(recipe_name, backend).multiple)
            library = "Transformer Engine" if backend == "te" else backend
            yield [f"`{recipe_name}`", library, ", ".join(forms), sizes, *able, software]


def _recipe_cells(policy: Policy) -> list[str]:
    compute = "tf32" if policy.tf32 and not policy.low_precision else policy.compute_dtype.short
    low = f"{' or '.join(policy.backends)}, {policy.low_bit_recipe}" if policy.low_bit_recipe else ""
    able = ("no" if hardware.named(gpu).refuses(policy) else "yes" for gpu in GPUS)
    return [compute, low, policy.master_dtype.short, policy.reduce_dtype.short, *able]


# -- targets ----------------------------------------------------------------------------------------------------------


def targets_page() -> str:
    """Return the page of the targets: what each plugin writes, and which fields of a policy it carries."""
    own = {
        name: each
        for name, each in targets.plugins().items()
        if each._settings.__module__.startswith("mpguard_plugins")
    }
    fields = [name for name in Policy.__dataclass_fields__ if any(name in each.carries for each in own.values())]
    rows = [
        ["field", *own],
        *([f"`{field}`", *("x" if field in each.carries else "" for each in own.values())] for field in fields),
    ]
    sections = []
    for name, each in own.items():
        needs = f"Needs `{each.module}`: `pip install 'mpguard[{each.extra}]'`." if each.module and each.extra else ""
        carried = ", ".join(f"`{field}`" for field in fields if field in each.carries)
        sections += [f"## {name}", inspect.cleandoc(each.doc), *([needs] if needs else []), f"Carries {carried}."]
    return _page(
        "# Targets",
        NOTE,
        "A target is what a policy can be written to: the config of a framework, or one of its objects. Each target"
        " is one plugin. `policy.to(target, strategy)` returns the object, `mpguard.inject(config, policy, target)`"
        " returns a changed config and the list of changes, and `mpguard recipes RECIPE --for TARGET` prints both.",
        f"Strategies: {', '.join(f'`{each}`' for each in targets.STRATEGIES)}.",
        "A target *carries* a field if changing the field can change what the target gets. If a policy needs a field"
        " that the target does not carry, `inject` and `to` warn `NotCarried`; `mpguard launch`, `mpguard.activate` and"
        " `mpguard apply` raise `PolicyError` if no target of the run carries it.",
        _table(rows),
        *sections,
    )


# -- command line -----------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """Return the reference of the commands, from their argparse parsers."""
    sections = []
    for command in cli.COMMANDS:
        module = importlib.import_module(f"mpguard.cli.{command}")
        parser = argparse.ArgumentParser(prog=f"mpguard {command}", add_help=False)
        module.configure(parser)
        sections += [f"## mpguard {command}", *_parser(parser, module.__doc__ or "")]
    return _page(
        "# Command line",
        NOTE,
        "Exit status of every command: 0 clean or done, 1 findings or not in force, 2 could not run. `mpguard COMMAND"
        " --help` prints the same in the terminal, `mpguard --version` the version.",
        _table(
            [
                ["command", "what it does"],
                *([f"[`mpguard {name}`](#mpguard-{name})", text] for name, text in cli.COMMANDS.items()),
            ]
        ),
        *sections,
    )


def _parser(parser: argparse.ArgumentParser, doc: str) -> Iterator[str]:
    yield from _prose(doc)
    usage = (parser.usage or _usage(parser)).replace("%(prog)s", parser.prog)
    yield f"```text\n{usage}\n```"
    formatter = argparse.HelpFormatter(parser.prog)
    for group in parser._action_groups:
        rows = [
            [_name(action), _help(formatter, action)]
            for action in group._group_actions
            if action.help != argparse.SUPPRESS
        ]
        if rows:
            heading = {"positional arguments": "argument", "options": "option"}.get(
                group.title or "", group.title or ""
            )
            yield from [group.description] if group.description else []
            yield _table([[heading, ""], *rows])
    if parser.epilog:
        yield from _prose(parser.epilog)


def _usage(parser: argparse.ArgumentParser) -> str:
    words = [parser.prog, "[OPTION ...]"]
    for action in parser._actions:
        if not action.option_strings:
            name = _value(action)
            words.append({"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name))
    return " ".join(words)


def _value(action: argparse.Action) -> str:
    if action.metavar:
        return str(action.metavar)
    if action.choices is not None:
        return "|".join(map(str, action.choices))
    return action.dest.upper()


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return _code(_value(action))
    takes = "" if action.nargs == 0 else f" {_value(action)}"
    return _code(", ".join(action.option_strings) + takes)


def _help(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    text = formatter._expand_help(action) if action.help else ""
    if not text and action.choices is not None:
        text = f"default: {action.default}"
    return " ".join(text.split()).replace("|", "\\|")


def _prose(text: str) -> Iterator[str]:
    """Yield the paragraphs of a help text; those that are laid out in columns as code."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        lines = paragraph.strip("\n").splitlines()
        laid_out = [line for line in lines if line.startswith((" ", "mpguard "))]
        title = [] if not lines or lines[0] in laid_out else lines[:1]
        if laid_out and len(laid_out) + len(title) == len(lines):
            yield from title
            yield "```text\n" + "\n".join(line.strip() for line in laid_out) + "\n```"
        elif lines:
            yield " ".join(lines)


# -- results of benchmarks --------------------------------------------------------------------------------------------


def gpu_pages() -> dict[str, str]:
    """Return the pages of what was proven on a GPU, from the result files."""
    matrix = json.loads((BENCHMARKS / "results/gpu_matrix.json").read_text("utf-8"))
    made = _benchmark("gpu_page")
    return {"gpu.md": made.page(matrix), "gpu_tables.md": made.tables(matrix)}


def _benchmark(name: str) -> ModuleType:
    """Return a program of benchmarks/, which is no package, as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- Markdown ---------------------------------------------------------------------------------------------------------


def _page(*parts: str) -> str:
    return "\n\n".join(parts) + "\n"


def _table(rows: Iterable[Iterable[str]]) -> str:
    header, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([header, f"| {'--- | ' * (header.replace(chr(92) + '|', '').count('|') - 1)}".rstrip(), *body])


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page differs")
    options = parser.parse_args(arguments)
    names = [f"docs/{name}" for name in write(DOCS, options.check)]
    text = README.read_text("utf-8")
    if (current := readme(text)) != text:
        names.append(README.name)
        if not options.check:
            README.write_text(current, "utf-8")
    for name in names:
        print(f"{'differs' if options.check else 'wrote'}: {name}")
    return int(options.check and bool(names))


if __name__ == "__main__":
    sys.exit(main())
