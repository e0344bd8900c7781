"""Configs of accelerate, DeepSpeed and training programs. Most YAML and JSON is none, and is skipped."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.lint.model import suppressions
from mpguard.lint.model.finding import Lines
from mpguard.lint.model.result import CONFIG, Defect, FileCheck
from mpguard.lint.model.rule import ConfigRule, Diagnostic
from mpguard.lint.run import prefilter
from mpguard.lint.run.readers.context import Context, RuleOutput, not_checked

if TYPE_CHECKING:
    from mpguard.document import Document
    from mpguard.document.nodes import Problem

#: A YAML or JSON that is found and longer than this is data; configs are far smaller.
LARGEST_FOUND = 256 << 10
#: What a file must hold to be a config of accelerate, DeepSpeed or axolotl: one of their keys.
_CONFIG_LIKE = lazy_pattern(
    rb"(?:^|[{,])[ \t]*[\"']?(?:compute_environment|distributed_type|mixed_precision"
    rb"|(?:fp8|fsdp|deepspeed|dynamo)_config|zero_optimization|train_(?:micro_)?batch_size\w*|torch_autocast|bf16|fp16|bfloat16|float16|fp8|base_model"
    rb"|data_types|finetuning_type|precision|transformer_engine|megatron_amp_O2|train_iters)[\"']?[ \t]*:",
    re.M,
)
#: What a config that does not parse must hold to be reported: a key that other files do not have, at a line's start.
_BROKEN_CONFIG = lazy_pattern(
    rb"^[ \t{]*[\"']?(?:compute_environment|distributed_type|(?:fp8|fsdp|deepspeed)_config|zero_optimization)"
    rb"[\"']?[ \t]*:",
    re.M,
)
#: What a value in a template begins with: `{{ batch }}`, `${BATCH}`, `<batch>`, `%BATCH%`, `@BATCH@`, `BATCH`.
_PLACEHOLDER = lazy_pattern(r"\{[{%]|[$<%@]|(?!(?:TRUE|FALSE|NULL|NONE|NAN|INF|INFINITY)\b)[A-Z][A-Z0-9_]+\b")
#: In the name of a key that sets a precision, or whether and how FP8 code is compiled.
_PRECISION_KEY = lazy_pattern("(?i)16|fp8|fp4|fp32|float|half|precision|dtype|scale|amp|compile")
_SUPPRESSION = lazy_pattern(rb"noqa|mpguard\s*:\s*i", re.I)


def _matters(problem: Problem, read: Document) -> bool:
    """True unless a key that does not concern precision is repeated in YAML of another program than accelerate.

    DeepSpeed reads JSON only, whatever the name of the file is.
    """
    if not problem.repeats or read.format != "yaml" or read.kind in (None, "accelerate"):
        return True
    if read.kind == "deepspeed" and read.text.lstrip().startswith("{"):
        return True
    return _PRECISION_KEY.search(problem.repeats) is not None


def _is_template(read: Document) -> bool:
    """True if a file has problems, the first at a placeholder (of `{{`, the second brace may be the place)."""
    if not read.problems:
        return False
    start = read.problems[0].span[0]
    return any(_PLACEHOLDER.match(read.text, place) for place in (start, max(start - 1, 0)))


def check(data: bytes, context: Context) -> FileCheck:
    """Check a YAML or JSON file, if it was named or is a config that mpguard supports."""
    named = context.target.named
    if not named and not _CONFIG_LIKE.search(data):
        return not_checked(recognized=False)
    from mpguard import document

    read = document.decode(data, context.path)
    lines = Lines(read.text)
    kind = None if read.root is None else read.kind
    diagnostics: list[Diagnostic] = []
    defects: list[Defect] = []
    ran = set(context.selection.codes)
    # A found file with problems that is not a config is another program's YAML, with tags or templates of its own.
    # One whose first problem is a placeholder is a template, from which a program writes the config.
    broken = read.root is None and _BROKEN_CONFIG.search(data) is not None
    ours = named or ((kind is not None or broken) and not _is_template(read))
    if context.is_on(CONFIG) and ours:
        problems = [each for each in read.problems if _matters(each, read)]
        if kind == "deepspeed" and any(each.hjson for each in problems):
            is_refused = context.project.deepspeed_config_read_as_json(context.path)
            problems = [each for each in problems if is_refused or not each.hjson]
        diagnostics = [Diagnostic(CONFIG, each.span, each.message) for each in problems]
    if kind is not None and isinstance(read.data, dict):
        rules = [
            rule
            for rule in context.selected(ConfigRule)
            if kind in rule.kinds and prefilter.matches(rule.triggers, data)
        ]
        found, defects = context.run_rules(rules, read)
        diagnostics += found
        ran -= {defect.code for defect in defects}
    elif read.problems:
        ran = set()
    comments = suppressions.NONE
    if read.format == "yaml" and (kind is not None or named) and _SUPPRESSION.search(data):
        comments = suppressions.in_yaml(lines)
    encode = None if read.root is None and read.problems else read.encoded
    output = RuleOutput(lines, diagnostics, ran, comments, defects, encode)
    if kind == "deepspeed":
        output.is_unused = lambda _: not context.project.deepspeed_config_read(context.path)
    checked = context.finish(output)
    checked.recognized = named or kind is not None or bool(checked.findings)
    return checked
