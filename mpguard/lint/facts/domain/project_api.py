"""What the facts of a file ask of the rest of the linted tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from mpguard.lint.project.requirements import Required

if TYPE_CHECKING:
    from mpguard.document import Document
    from mpguard.lint.facts.file import Facts
    from mpguard.lint.project.launch_configs import LaunchConfig


class ProjectApi(Protocol):
    """What the facts ask of the rest of the linted tree."""

    def configs_for(self, path: str) -> tuple[LaunchConfig, ...]:
        """The launch configs that a file is started with."""

    def declared(self, path: str) -> Literal["training", "inference"] | None:
        """What `training-paths` and `inference-paths` say about a file."""

    def gpu(self, path: str) -> str | None:
        """What the code is said to run on: a name (`h100`) or a capability (`sm_90`)."""

    def required(self, path: str, package: str) -> Required:
        """The versions of a package that the project of a file asks for."""

    def config_named(self, path: str, name: str) -> Document | None:
        """The config that a file names, beside it or in the working directory."""

    def source_of(self, module: str, from_path: str) -> Facts | None:
        """The facts of an imported module of the linted tree; leading dots for relative imports."""

    def imported_elsewhere(self, path: str, name: str) -> bool:
        """Whether another file of the tree may take a name from a module."""


class NoProject:
    """A file linted by itself."""

    def configs_for(self, path: str) -> tuple[LaunchConfig, ...]:  # noqa: ARG002
        return ()

    def declared(self, path: str) -> Literal["training", "inference"] | None:  # noqa: ARG002
        return None

    def gpu(self, path: str) -> str | None:  # noqa: ARG002
        return None

    def required(self, path: str, package: str) -> Required:  # noqa: ARG002
        return Required()

    def config_named(self, path: str, name: str) -> Document | None:  # noqa: ARG002
        return None

    def source_of(self, module: str, from_path: str) -> Facts | None:  # noqa: ARG002
        return None

    def imported_elsewhere(self, path: str, name: str) -> bool:  # noqa: ARG002
        return False
