from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpguard.lint import (
    Diagnostic,
    Document,
    Entry,
    LaunchRule,
    Note,
    accelerate_config,
    any_of,
    errors,
    launch_lines,
    lazy_pattern,
    siblings,
    tracked_fs,
)

#: Parsers that make `TrainingArguments` of the command line.
_PARSERS = lazy_pattern(rb"\b(?:HfArgumentParser|TrlParser|parse_args_into_dataclasses)\b")
_ARGUMENTS = lazy_pattern(rb"\b(?:Seq2Seq)?TrainingArguments\b")
#: What may give a script's `TrainingArguments` other defaults: a setting of its own, or a class of another module.
_OTHER_DEFAULTS = lazy_pattern(
    rb"\b(?:bf16|fp16)(?:_full_eval)?[\"']?\s*(?::|=(?!=))|\btrl\b|\bset_defaults\b"
    rb"|\bfrom\s+(?!transformers\b)[\w.]+\s+import\s+(?:\([^)]*?|[^(\n]*?)(?:\w*Arg(?:ument)?s\b|\*)"
)
#: Switches of the Trainer that are mostly passed without a value: a variable after one may hold any options.
_SWITCH = lazy_pattern(r"--(?:do_|overwrite_)")
#: Options that name a file of further options.
_ARGUMENT_FILE = lazy_pattern(r"--[\w-]*(?:config|args)(?:[_-]?(?:file|path))?(?:=|$)")
_TRUE, _FALSE = frozenset({"true", "yes", "1", "t", "y"}), frozenset({"false", "no", "0", "f", "n"})
_MODES = ("fp16", "bf16")


class LaunchFlagsAgainstConfig(LaunchRule, form_of="MPG863"):
    """`--bf16` or `--fp16` on a launch line, against the config on the same line.

    With a DeepSpeed file the run stops ("Please correct the following DeepSpeed config values that mismatch
    TrainingArguments values"): the flags are compared, and neither `--torch_dtype` nor `auto_cast` counts. With
    accelerate the flag silently wins, and FP8 of the config is off. With both flags TrainingArguments raise "At most
    one of fp16 and bf16 can be True" (transformers 5.23).

    The script must be in the tree and contain the parser. Values from variables are unknown, and a config with `no` or
    `auto` is not compared. A line without a flag is compared if the script gives `TrainingArguments` no other defaults.
    """

    message = "`{flag}`, but {what}"
    help = "set the precision in one place"
    triggers = (any_of(b"--bf16", b"--fp16", b"--deepspeed"),)

    def check(self, launches: list[launch_lines.Launch]) -> Iterator[Diagnostic]:
        for launch in launches:
            flags = {mode: found for mode in _MODES if (found := self._flag(launch, f"--{mode}")) is not None}
            on = [mode for mode, (_, value) in flags.items() if value is True]
            if any(value is None for _, value in flags.values()) or not self._parses_arguments(launch):
                continue
            if len(on) > 1:
                word, other = flags[on[-1]][0], flags[on[0]][0]
                notes = (Note("the other flag", other.span),)
                yield self.at(word, flag=word.text, what=f"`--{on[0]}` is on too: the run stops", notes=notes)
            elif on:
                yield from self._against_config(launch, on[0], flags[on[0]][0])
            else:
                yield from self._without_flag(launch)

    def _against_config(self, launch: launch_lines.Launch, mode: str, word: launch_lines.Word) -> Iterator[Diagnostic]:
        configured = self._configured(launch)
        if configured is not None and configured[0] != mode:
            wanted, place, effect = configured
            notes = (Note(f"it sets `{wanted}`", place.span),)
            yield self.at(word, flag=word.text, what=f"the config sets `{wanted}`: {effect}", notes=notes)
        elif (named := launch.argument("--deepspeed")) is not None and not launch.hidden:
            entry = self._entry(named[1], f"{mode}.enabled", launch)
            if entry is not None and entry.value is False:
                notes = (Note(f"it switches `{mode}` off", named[1].span),)
                yield self.at(
                    word, flag=word.text, what=f"the config switches `{mode}` off: the run stops", notes=notes
                )

    def _without_flag(self, launch: launch_lines.Launch) -> Iterator[Diagnostic]:
        """Report a line with neither flag whose DeepSpeed file enables one."""
        named = launch.argument("--deepspeed")
        if named is None or named[1].text is None or not self._is_known(launch):
            return
        for mode in _MODES:
            entry = self._entry(named[1], f"{mode}.enabled", launch)
            if entry is not None and entry.value is True:
                what = f"it enables `{mode}`, and the line has no `--{mode}`: the run stops"
                help = f'pass `--{mode} True`, or write `"enabled": "auto"` in the DeepSpeed file'
                yield self.at(named[1], flag=f"--deepspeed {named[1].text}", what=what, help=help)

    def _is_known(self, launch: launch_lines.Launch) -> bool:
        """True if all options of a line are visible, and `TrainingArguments` have the defaults of the library."""
        before = ""
        for word in launch.arguments:
            text = word.text or ""
            is_value = before.startswith("--") and "=" not in before
            if (not text and (not is_value or _SWITCH.match(before))) or "_full_eval" in text:
                return False
            if text.endswith((".yaml", ".yml", ".json")) and not text.startswith("--") and not is_value:
                return False
            if _ARGUMENT_FILE.match(text):
                return False
            before = text
        script = self._script(launch)
        return _ARGUMENTS.search(script) is not None and _OTHER_DEFAULTS.search(script) is None

    def _flag(self, launch: launch_lines.Launch, name: str) -> tuple[launch_lines.Word, bool | None] | None:
        """Return a switch of the script and its value; None for an unknown value, and without the switch."""
        for place, word in enumerate(launch.arguments):
            flag, equals, value = (word.text or "").partition("=")
            if flag != name:
                continue
            following = launch.arguments[place + 1] if place + 1 < len(launch.arguments) else None
            if equals:
                return word, _truth(value)
            if following is None or (following.text or "").startswith("-"):
                return word, True
            return word, None if following.text is None else _truth(following.text)
        return None

    def _parses_arguments(self, launch: launch_lines.Launch) -> bool:
        return _PARSERS.search(self._script(launch)) is not None

    def _script(self, launch: launch_lines.Launch) -> bytes:
        """Return the content of the script; empty if it is not in the tree."""
        name = launch.script.text if launch.script is not None and not launch.module else None
        script = self.project.named_in(name, launch.path) if name else None
        try:
            return tracked_fs.read(script) if script is not None else b""
        except OSError:
            return b""

    def _entry(self, word: launch_lines.Word, key: str, launch: launch_lines.Launch) -> Entry | None:
        """Return an entry of the DeepSpeed file that a word names."""
        document = self._read(word, launch)
        return document.entry(key) if document is not None and document.kind == "deepspeed" else None

    def _configured(self, launch: launch_lines.Launch) -> tuple[str, launch_lines.Word, str] | None:
        """Return the precision of the config on the line, the word that names it, and what happens otherwise."""
        if launch.hidden:
            return None
        named = launch.argument("--deepspeed")
        if named is not None:
            document = self._read(named[1], launch)
            known = document is not None and document.kind == "deepspeed"
            mode = siblings.deepspeed_precision(document.data) if document is not None and known else None
            return (mode, named[1], "the run stops") if mode is not None else None
        place = launch.options.get("mixed_precision")
        if place is not None:
            mode = place.text
        else:
            place = launch.options.get("config_file")
            document = self._read(place, launch) if place is not None and launch.launcher == "accelerate" else None
            known = document is not None and document.kind == "accelerate"
            mode = accelerate_config.mixed_precision_mode(document) if document is not None and known else None
        if place is None or mode not in ("fp16", "bf16", "fp8"):
            return None
        return mode, place, "the flag wins" + (", and FP8 is off" if mode == "fp8" else "")

    def _read(self, word: launch_lines.Word, launch: launch_lines.Launch) -> Document | None:
        from mpguard.lint import document

        path: Path | None = self.project.named_in(word.text, launch.path) if word.text else None
        try:
            if path is None or (tracked_fs.size(path) or 0) > siblings.LARGEST_CONFIG:
                return None
            read = document.read(path)
            read.require()
            return read
        except (OSError, errors.ConfigError):
            return None


def _truth(value: str) -> bool | None:
    return True if value.lower() in _TRUE else False if value.lower() in _FALSE else None
