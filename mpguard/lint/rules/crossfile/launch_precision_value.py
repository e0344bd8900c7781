from __future__ import annotations

from collections.abc import Iterator

from mpguard.lint import Diagnostic, Edit, Fix, LaunchRule, Note, any_of, launch_lines, lazy_pattern

#: An option for the precision that ends in `=`: its value is the empty string.
_EMPTY = lazy_pattern(r"--[\w-]*(?:mixed[_-]precision|precision|dtype|fp16|bf16|fp8|amp)[\w-]*=$")
_VALUE = lazy_pattern(
    r"(?i)[\w.]*(?:fp16|bf16|fp32|fp8|float16|bfloat16|float32|half|mixed|true|false)|no|amp|O[0-3]|16|32"
)
_CHOICES = ("no", "fp16", "bf16", "fp8")
#: Names of dtypes that the launcher does not know -> what it calls them.
_MEANT = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "no", "fp32": "no", "float8": "fp8"}


class LaunchPrecisionValue(LaunchRule, form_of="MPG813"):
    """An option for the precision on a launch line has an empty or unknown value.

    A shell splits words at spaces: the option gets an empty string, which most scripts take for "not set", and `fp16`
    becomes an argument of its own. argparse stops at it; a script that uses `parse_known_args` ignores it, and trains
    in another precision. An unknown value stops the launcher ("invalid choice", accelerate 1.15).

    Values from variables are unknown.
    """

    message = "`{option}` {what}"
    help = "write the value directly after the equals sign"
    triggers = (any_of(b"precision", b"dtype", b"16", b"fp8", b"amp"),)
    fixes = True

    def check(self, launches: list[launch_lines.Launch]) -> Iterator[Diagnostic]:
        for launch in launches:
            for word, following in zip(launch.arguments, launch.arguments[1:], strict=False):
                if _EMPTY.match(word.text or "") and _VALUE.fullmatch(following.text or ""):
                    edit = Edit(word.span[1], following.span[0], "")
                    yield self.at(
                        word,
                        option=word.text,
                        what=f"is an empty value: `{following.text}` is another argument",
                        fix=Fix("Remove the space", "safe", (edit,)),
                        notes=(Note("the value", following.span),),
                    )
            given = launch.options.get("mixed_precision") if launch.launcher == "accelerate" else None
            known = _MEANT.get(given.text or "") if given is not None else None
            if given is not None and known is not None:
                yield self.at(
                    given,
                    option=f"--mixed_precision {given.text}",
                    what=f"is not one of {', '.join(f'`{each}`' for each in _CHOICES)}: the launch stops",
                    help=f"write `{known}`",
                    fix=self._fix(given, known),
                )

    def _fix(self, given: launch_lines.Word, known: str) -> Fix | None:
        start, end = given.span
        length = len(given.text or "")
        if end - start not in (length, length + len("--mixed_precision=")):
            return None  # in quotes
        return Fix(f"Write `{known}`", "safe", (Edit(end - length, end, known),))
