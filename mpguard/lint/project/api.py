"""The interface through which the facts of a file access the rest of the linted tree."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mpguard.lint.project.questions import settings, uses
from mpguard.lint.project.questions.asked import Question
from mpguard.lint.project.requirements import Required

if TYPE_CHECKING:
    from mpguard.document import Document
    from mpguard.lint.project.launch_configs import LaunchConfig
    from mpguard.lint.project.launch_lines import Launch
    from mpguard.policy.policy import Policy


class ProjectApi:
    """The rest of the linted tree, as the facts of a file access it. This class itself is for a file without a tree.

    What returns facts of other files returns objects of the class of the asking ones.
    """

    def _ask(
        self,
        path: str,  # noqa: ARG002
        question: Question,  # noqa: ARG002
        name: str = "",  # noqa: ARG002
        otherwise: bool = False,
        whole: bool = False,  # noqa: ARG002
    ) -> bool:
        """Answer a question about the project of a file; outside of a project, the answer is `otherwise`.

        whole: a folder that the user has named is as good as a project.
        """
        return otherwise

    def configs_for(self, path: str) -> tuple[LaunchConfig, ...]:  # noqa: ARG002
        """Return the launch configs that start a file."""
        return ()

    def launches_of(self, path: str) -> tuple[Launch, ...]:  # noqa: ARG002
        """Return the launch lines of the tree that start a file."""
        return ()

    def launches_given(self, path: str) -> tuple[Launch, ...]:  # noqa: ARG002
        """Return the launch lines of the tree that give a Python file to another script, as its config."""
        return ()

    def declared(self, path: str) -> Literal["training", "inference"] | None:  # noqa: ARG002
        """Return the role that `training-paths` and `inference-paths` declare for a file, or None."""
        return None

    def gpu(self, path: str) -> str | None:  # noqa: ARG002
        """Return the GPU that is declared or named for a file: a name (`h100`) or a capability (`sm_90`), or None."""
        return None

    def policies(self, path: str) -> list[Policy]:  # noqa: ARG002
        """Return the policies that the launch configs of a file name, else the one that its settings name."""
        return []

    def required(self, path: str, package: str) -> Required:  # noqa: ARG002
        """Return the versions of a package that the project of a file requires."""
        return Required()

    def config_named(self, path: str, name: str) -> Document | None:  # noqa: ARG002
        """Return the config that a file names, in its folder or in one above in its tree; None if there is none."""
        return None

    def deepspeed_half(self, path: str) -> str:  # noqa: ARG002
        """Return "FP16" or "BF16" if the DeepSpeed JSONs in the folder of a file all cast the model to it, else ""."""
        return ""

    def launches_with_deepspeed_only(self, path: str) -> bool:
        """True if the project has accelerate configs, and all of them choose DeepSpeed."""
        return self._ask(path, settings.configs_choose_deepspeed)

    def executed_settings(self, path: str, names: frozenset[str]) -> dict[str, list[object]]:  # noqa: ARG002
        """Return what Python files that only set some of these names, in the config folders of a script, set them to.

        A script that calls `exec` runs one of them in its own namespace.
        """
        return {}

    def source_of(self, module: str, from_path: str) -> Any | None:  # noqa: ARG002
        """Return the facts of an imported module of the linted tree, or None.

        Leading dots stand for relative imports.
        """
        return None

    def users_of(self, name: str, path: str) -> list[Any] | None:  # noqa: ARG002
        """Return the facts of the modules that use a name of a file and may train; None if they are not all known."""
        return []

    def facts_at(self, path: str) -> Any | None:  # noqa: ARG002
        """Return the facts of a file that are in use; None if there are none."""
        return None

    def add_linted(self, facts: Any) -> None:
        """Make the facts of the file that is being checked those of its module."""

    def imported_elsewhere(self, path: str, name: str) -> bool:  # noqa: ARG002
        """True if another file of the tree may import a name from a module."""
        return False

    def derived_elsewhere(self, path: str, name: str) -> bool:  # noqa: ARG002
        """True if a class of another file of the tree may derive from a class of a module."""
        return False

    def used_elsewhere(self, path: str, name: str = "") -> bool:  # noqa: ARG002
        """True if other code may use a top-level name of a module; without a name, the module itself."""
        return True

    def is_left_over(self, path: str, name: str, is_program: bool) -> bool:
        """True if no other code uses a top-level name of a program, or of a module of which it uses other names."""
        if not is_program and not self._ask(path, uses.may_use, whole=True):
            return False
        return not self._ask(path, uses.may_use, name, otherwise=not is_program, whole=True)

    def all_users_of(self, path: str, name: str) -> list[Any] | None:  # noqa: ARG002
        """Return the facts of all other modules that may use a top-level name of a file; None if they are not known."""
        return None

    def method_used_elsewhere(self, path: str, name: str) -> bool:
        """True if other code may use a method of this name of a class of a file; outside of a project, it may."""
        return self._ask(path, uses.may_call, name, otherwise=True)

    def is_replaced(self, path: str, name: str) -> bool:
        """True if another file that imports a module has its own definition of a function of this name."""
        return self._ask(path, uses.is_replaced, name)

    def attribute_set_from_outside(self, path: str, name: str) -> bool:
        """True if a file that uses another one assigns to an attribute of this name, other than of `self`."""
        return self._ask(path, uses.may_set_from_outside, name)

    def compiled_elsewhere(self, path: str) -> bool:
        """True if other code may compile a model that a file gets; outside of a project, it may."""
        return self._ask(path, settings.may_compile, otherwise=True, whole=True)

    def scaler_updated_elsewhere(self, path: str) -> bool:
        """True if other code may update a GradScaler that a file steps with; outside of a project, it may."""
        return self._ask(path, settings.may_update_scaler, otherwise=True, whole=True)

    def looked_up(self, path: str) -> bool:  # noqa: ARG002
        """True if code of the project of a file may get a class by a name that is not in the code."""
        return True

    def is_library(self, path: str) -> bool:  # noqa: ARG002
        """True if a file is in a package that other projects may install, and use."""
        return False

    def is_all_code(self, path: str) -> bool:
        """True if a file is the only Python file of its project, which has no notebook either."""
        return self._ask(path, uses.is_all_code)

    def asks_for(self, path: str, word: str) -> bool:
        """True if a script, config or text of the project contains a word; outside of a project that is unknown."""
        return self._ask(path, settings.may_ask_for, word, otherwise=True)

    def mentioned_beside(self, path: str, name: str, paths: Iterable[str]) -> bool:
        """True if code in the folder that contains a file and others, but not in the file, has a name."""
        folder = os.path.commonpath([Path(each).absolute().parent for each in (path, *paths)])
        return self._ask(path, uses.may_mention, f"{name} {folder}", otherwise=True)

    def keyword_given_elsewhere(self, path: str, name: str) -> bool:
        """True if other code gives something a keyword argument of this name; outside of a project, it may."""
        return self._ask(path, uses.may_give, name, otherwise=True)

    def drops_option(self, path: str, name: str) -> bool:
        """True if no code of the project of a file reads an option; outside of a project, it may."""
        return not self._ask(path, settings.may_read_option, name, otherwise=True)

    def drops_field(self, path: str, name: str) -> bool:
        """True if no code of the project of a file reads a field of a class; outside of a project, it may."""
        return not self._ask(path, settings.may_read_field, name, otherwise=True)

    def never_scales(self, path: str) -> bool:
        """True if no code of the project of a file scales a loss, or uses what may scale it."""
        return not self._ask(path, settings.may_scale_loss, otherwise=True, whole=True)

    def passes_option(self, path: str, name: str) -> bool:  # noqa: ARG002
        """True if a script, config or text of the project of a file passes an option that asks for low precision."""
        return False

    def gives_option(self, path: str, name: str, value: str) -> bool:
        """True if a config or script of the project of a file gives an option this value."""
        return self._ask(path, settings.gives_option, f"{name} {value}")

    def gives_unhandled(self, path: str, name: str, value: str) -> bool:
        """True if a config or script of the project gives an option a value that no code of the project mentions."""
        return self.gives_option(path, name, value) and not self._ask(path, settings.may_handle_value, value)

    def unread_keys(self, path: str) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the configs that a file names with a key for low precision that no code names, each with the key."""
        return []

    def deepspeed_config_read(self, path: str) -> bool:
        """True if something in the project may read the DeepSpeed config that a file is, or contains."""
        return self._ask(path, settings.may_read_deepspeed, otherwise=True)
