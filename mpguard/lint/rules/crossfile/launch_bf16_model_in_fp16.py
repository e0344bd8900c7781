from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Diagnostic, LaunchRule, Note, any_of, launch_lines, lazy_pattern, library_names

#: Options that name the model which is trained.
_MODEL = lazy_pattern(r"--(?:base_|pretrained_)?model(?:[_-]?(?:name|name_or_path|id|path|checkpoint))?")
_TRUE = frozenset({"true", "yes", "1", "t", "y"})
#: Words in the names of scripts that train nothing.
_NO_TRAINING = lazy_pattern(r"(?i)infer|predict|eval|generat|test|demo|serve")


class LaunchBf16ModelInFp16(LaunchRule, form_of="MPG519"):
    """A launch line trains a checkpoint in FP16 whose activations overflow in FP16.

    They were pretrained in BF16, which has the range of FP32: the loss is NaN or 0, or the GradScaler skips all steps
    (see MPG519).

    A model that a variable, a config or a default names is unknown.
    """

    message = "`{flag}`, but the activations of `{model}` overflow in FP16"
    help = "pass `--bf16` (`--mixed_precision bf16`), or train in FP32 on a GPU without BF16"
    triggers = (any_of(b"fp16"), any_of(b"t5-", b"T0", b"mt0-", b"ul2", b"gemma-3"), any_of(b"model"))

    def check(self, launches: list[launch_lines.Launch]) -> Iterator[Diagnostic]:
        for launch in launches:
            model, half = self._model(launch), self._half(launch)
            if model is not None and half is not None and self._trains(launch):
                flag = half.text or ""
                shown = flag if flag.startswith("--") else f"--mixed_precision {flag}"
                yield self.at(half, flag=shown, model=model[1], notes=(Note("the model", model[0].span),))

    def _model(self, launch: launch_lines.Launch) -> tuple[launch_lines.Word, str] | None:
        words = launch.arguments
        for place, word in enumerate(words):
            option, equals, value = (word.text or "").partition("=")
            if not _MODEL.fullmatch(option):
                continue
            given = word if equals or place + 1 == len(words) else words[place + 1]
            name = value if equals else given.text or ""
            if library_names.OVERFLOWS_FP16.fullmatch(name):
                return given, name
        return None

    def _half(self, launch: launch_lines.Launch) -> launch_lines.Word | None:
        """Return the word that makes the line FP16."""
        words = launch.arguments
        for place, word in enumerate(words):
            option, equals, value = (word.text or "").partition("=")
            if option != "--fp16":
                continue
            if not equals and place + 1 < len(words):
                following = words[place + 1].text
                value = "true" if following is not None and following.startswith("-") else following or ""
            return word if value.lower() in _TRUE or (not value and not equals and place + 1 == len(words)) else None
        given = launch.options.get("mixed_precision") if launch.launcher == "accelerate" else None
        return given if given is not None and given.text == "fp16" else None

    def _trains(self, launch: launch_lines.Launch) -> bool:
        name = launch.script.text if launch.script is not None else None
        flags = {word.text for word in launch.arguments}
        only_evaluates = bool({"--do_eval", "--do_predict"} & flags) and "--do_train" not in flags
        return name is None or not (only_evaluates or _NO_TRAINING.search(name.rpartition("/")[2]))
