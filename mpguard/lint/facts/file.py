"""`Facts`: the result of the static analysis of one Python file, and the only interface that a rule needs.

A rule does not walk a syntax tree. It calls `facts.events("cast")`, `facts.calls["step"]`, `facts.evaluate(...)`,
`facts.regions(...)` and `facts.flow`, and yields diagnostics at events.

The kinds of events are listed in `events/event.py` (`EventKind`). `facts.events(kind)` returns the events of a kind in
order of evaluation.
"""

from __future__ import annotations

from functools import cached_property

from mpguard.lint.facts.domain.casts import CastFacts
from mpguard.lint.facts.domain.checkpoints import Checkpoints
from mpguard.lint.facts.domain.master_weights import MasterWeights
from mpguard.lint.facts.domain.optimizers import Optimizers
from mpguard.lint.facts.domain.training_use import TrainingUse
from mpguard.lint.facts.domain.view import DomainView
from mpguard.lint.facts.domain.wrappers import WrapperFacts
from mpguard.lint.facts.program.mappings import Mappings
from mpguard.lint.facts.syntax.constant_flags import SUPPORTS_BF16, apply_constant_flags
from mpguard.lint.project.api import ProjectApi
from mpguard.lint.project.questions import settings
from mpguard.lint.source.source import Source
from mpguard.lint.source.strip_comments import stripped


class Facts(DomainView):
    """The facts of one file.

        path           the path of the file
        module         the module scope
        calls          all calls, by the last name of the callee: `facts.calls["step"]`
        flow           forward and backward data flow
        precision      the dtypes of tensors
        scalars        Python numbers that are combined with tensors
        autocast_states  the autocast state at a place
        measures       what the file does only to measure, or to evaluate
        wrappers       objects wrapped by Accelerate, DeepSpeed or FSDP
        optimizers     the optimizers and Trainers, and what they train
        master_weights  FP32 master weights that may be kept
        casts          what a cast changes: a model or a tensor, and whether it rounds
        training_use   the values and weights that are trained
        frozen_params  the models that are never trained
        checkpoints    the states that are saved and restored
        project        the configs, settings and other files of the linted tree

    These attributes, their methods, and the methods of this class are what rules use; a test holds it. The modules of
    `mpguard.lint.facts` also use `source`, `index`, `values`, `classes`, `graph`, `regions_index`, `imported_module`
    and `parsed_bytes`, which may change at any time.

    Raises `text.Unparsable` for a file that Python accepts and LibCST does not.
    """

    def __init__(self, source: Source, project: ProjectApi | None = None, imported: bool = False) -> None:
        """Index the file.

        imported: this is a module that a linted file imports. Its statements are parsed on demand, when one of the
        names that they bind is needed.
        """
        super().__init__(source, project, imported)
        source.items_of = self.part(Mappings).items_of
        self.wrappers = self.part(WrapperFacts)
        self.casts = self.part(CastFacts)
        self.training_use = self.part(TrainingUse)
        self.optimizers = self.part(Optimizers)
        self.master_weights = self.part(MasterWeights)
        self.checkpoints = self.part(Checkpoints)
        if not imported:
            apply_constant_flags(self.index, {SUPPORTS_BF16: True} if self.always_supports_bf16() else {})
            self.project.add_linted(self)

    @cached_property
    def may_update_scaler(self) -> bool:
        """True if the file, or other code of its project, may update a GradScaler that the file steps with."""
        code = stripped(self.file_text).encode("utf-8", "surrogateescape")
        return settings.updates(code) or self.project.scaler_updated_elsewhere(self.path)

    @property
    def may_keep_masters(self) -> bool:
        """True if FP32 master weights may be kept, and the loss scaled, by other means than torch.amp."""
        return self.master_weights.may_be_kept
