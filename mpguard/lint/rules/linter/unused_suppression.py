from __future__ import annotations

from mpguard.lint import Bad, EngineRule


class UnusedSuppression(EngineRule):
    """A suppression matches no finding.

    ## Why is this bad
    The mistake that it was written for has been fixed, or the comment is on the wrong line. If it stays, it will hide
    the next mistake.

    ## What is reported
    Codes of mpguard in `# noqa: ...`, and `# mpguard: ignore` and `ignore-file` with and without codes. A plain
    `# noqa` and the codes of other tools are never reported; nor are codes whose rules did not run: not selected, off
    for the file, or the file could not be read.

    ## Fix safety
    Safe: only the comment changes, and only the part that belongs to mpguard.
    """

    code, name = "MPG002", "unused-suppression"
    severity = "warning"
    message = "unused suppression: {what}"
    help = "remove it"
    examples = (
        Bad(
            """\
import torch

x = torch.ones(2)  # mpguard: ignore[MPG101] it was FP16 once  # !
y = torch.ones(2)  # noqa: E501, MPG101  # !
""",
            fixed="""\
import torch

x = torch.ones(2)
y = torch.ones(2)  # noqa: E501
""",
        ),
    )
