from __future__ import annotations

from mpguard.lint import Bad, EngineRule, Good


class UnknownSuppressionCode(EngineRule):
    """A suppression names a code that no rule has, or is misspelt, and has no effect.

    ## Why is this bad
    It looks as if a finding were suppressed on purpose. The finding that it was written for is still reported, or is
    reported again later under its correct code.
    """

    code, name = "MPG001", "unknown-suppression-code"
    severity = "warning"
    message = "there is no rule `{code}`"
    help = "name a code that exists; `mpguard rule --all` lists them"
    examples = (
        Bad("""\
x = x.half()  # noqa: MPG1001  # !
y = y.half()  # mpguard: ingore[MPG101] rounding is meant  # !
"""),
        Good("""\
x = x + 1  # noqa: E501, F841
y = x.exp()  # noqa: MPG506
# mpguard: the policy decides the dtype of y
"""),
    )
