"""The versions of a package that the project of a file requires: by pyproject.toml, requirements*.txt, a README ..."""

from __future__ import annotations

import codecs
import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mpguard.core import tracked_fs
from mpguard.core.lazy_pattern import lazy_pattern
from mpguard.core.tracked_fs import cached_per_run

if TYPE_CHECKING:
    from packaging.version import Version

#: Files that name requirements; text files with a name of `_NAMED` too, there and in the folders below, and conda's
#: environments.
_FILES = ("pyproject.toml", "setup.py", "setup.cfg", "settings.ini", "requirements.in")
_OF_DOCKER = ("ockerfile", ".base", ".dev", ".devel", ".gpu", ".cuda", ".train")  # Dockerfile, train.dockerfile ...
_NAMED = lazy_pattern(r"(?i)requir|^reqs?\b|^req\w*ments")
_ENVIRONMENT = lazy_pattern(r"(?i)conda|(?:^|[_-])env(?:ironment)?s?(?:[_.-]|$)")
_LISTS = ("requirement", "requirements")  # without a suffix
_FOLDERS = ("requirements", "docker")
_ENVIRONMENTS = ("conda", "env", "envs", "environments")
#: An environment of conda with any name, and the most files of a folder that may be one.
_DEPENDENCIES = lazy_pattern(r"^dependencies:[ \t]*(?:#.*)?\n[ \t]*- ", re.M)
_MOST_ENVIRONMENTS = 20
#: Scripts whose commands install packages: `pip install deepspeed==0.6.3`. So do README.rst, Markdown of the folder,
#: and Markdown about it in the folders below.
_SETS_UP = lazy_pattern(r"(?i)install|setup|requir|(?:^|[_-])env")
_DOCUMENTS = ("docs", "doc", "documents")
_NO_INSTRUCTIONS = lazy_pattern(r"(?i)change|history|news|releas")
_ABOUT_INSTALLING = lazy_pattern(r"(?i)install|environment|setup|get.?started|requir")
_INSTALLS = lazy_pattern(r"\b(?:(?:pip3?|conda|mamba) install|(?:conda|mamba) create)\b((?:[^\n`\\]|\\\n)*)")
#: A line of a text that is a requirement: `- pytorch == 1.8.1`, `1.10 <= torch < 2.0`, `* PyTorch 1.8.1`; and a literal
#: in a line about installing.
_SPECIFIED = r"([A-Za-z][\w.-]*[ \t]*(?:[=~!]=|[<>]=?)[ \t]*\d[\w.*+, <>=]*)"
_REQUIREMENT = lazy_pattern(rf"^[ \t>*+-]*`?{_SPECIFIED}`?[ \t]*$", re.M | re.ASCII)
_LITERAL = lazy_pattern(rf"`{_SPECIFIED}`", re.ASCII)
_INSTALLED_BY = lazy_pattern(r"(?i)\binstall|\brequire|\bdepend")
_BETWEEN = lazy_pattern(
    r"^[ \t>*+-]*`?(\d[\d.]*)[ \t]*<=?[ \t]*([A-Za-z][\w.-]*)[ \t]*(<=?[ \t]*\d[\d.]*)`?[ \t]*$", re.M | re.ASCII
)
_TORCH_VERSION = lazy_pattern(
    r"(?i)^[ \t>*+-]*`?(?:py)?torch[ \t]+v?(\d+\.\d[\d.]*)`?[ \t]*(?:<br[ \t]*/?>)?$"
    r"|\b(?:py)?torch[ \t]+v?(\d+\.\d[\d.]*)\+cu\d+",
    re.M | re.ASCII,
)
#: A link of Markdown, `[PyTorch](https://pytorch.org) 1.10`, and an item with several requirements,
#: `- Python == 3.10, PyTorch == 2.0.1`.
_LINK = lazy_pattern(r"\[([A-Za-z][A-Za-z -]{0,40})\]\([^()\n]{0,300}\)", re.ASCII)
_ITEM = r"[A-Za-z][\w.-]*[ \t]*(?:[=~!]=|[<>]=?)[ \t]*\d[\w.*+]*"
_LISTED = lazy_pattern(
    rf"^[ \t]*[*+-][ \t]*`?{_ITEM}`?(?:,[ \t]+(?:`?{_ITEM}`?|[^\s\d<>=~,`][^\d<>=~,\n]*))+$", re.M | re.ASCII
)
#: A variable of a Dockerfile and its value: `ENV PYTORCH_VERSION=1.12.1`.
_DOCKER_VARIABLE = lazy_pattern(r"^(?:ARG|ENV)[ \t]+(\w+)(?:=|[ \t]+)[\"']?([\w.+:/-]+)[\"']?[ \t]*$", re.M)
#: What `pip list` and `conda list` print, and a row of it.
_PRINTED = lazy_pattern(r"\A\s*(?:Package[ \t]+Version\b|# packages in environment\b)")
_ROW = lazy_pattern(r"^([A-Za-z][\w.-]*)[ \t]+(\d[\w.+-]*)(?:[ \t].*)?$", re.M | re.ASCII)
_LARGEST = 1 << 18
#: The number of folders that are searched: a file's own, and those above it.
_MOST_FOLDERS = 12
_CUDA = lazy_pattern(r"(?:\bcu(1[1-3])(\d)\b|\bnvidia/cuda:(\d\d)\.(\d+))")
#: What an environment gives: a version of Python, and the CUDA version of torch's builds, by conda's packages and by
#: the index of its wheels. Each with the version of a package from which on it cannot be installed there any more
#: (pytorch.org/get-started/previous-versions; `Requires-Python` of the wheels).
_PYTHON = lazy_pattern(r"\bpython=+(\d)\.(\d{1,2})(?!\d)", re.ASCII)
_LOWEST_PYTHON = lazy_pattern(r"\brequires?[-_]python[ \t]*=[ \t]*[\"']>=[ \t]*(\d)\.(\d{1,2})", re.ASCII)
_WITHOUT_PYTHON = {
    "torch": {(3, 6): (1, 11), (3, 7): (2, 0)},
    "accelerate": {(3, 6): (0, 21), (3, 7): (0, 21)},
    "lightning": {(3, 6): (2, 0), (3, 7): (2, 0)},
    "pytorch-lightning": {(3, 6): (2, 0), (3, 7): (2, 0)},
}
_BUILT_WITH = lazy_pattern(r"\b(?:pytorch-cuda|cudatoolkit)\s*=+\s*(\d{1,2})\.(\d{1,2})|/whl/cu(\d\d)(\d)\b", re.ASCII)
_BY_CONDA = lazy_pattern(r"(?<![\w/.-])pytorch(?![\w-])")
_WITHOUT_CUDA = {
    (9, 2): (1, 8), (10, 0): (1, 5), (10, 1): (1, 9), (10, 2): (1, 13), (11, 0): (1, 8), (11, 1): (1, 11),
    (11, 3): (1, 13), (11, 5): (1, 12), (11, 6): (1, 14), (11, 7): (2, 1), (11, 8): (2, 8), (12, 1): (2, 6),
    (12, 4): (2, 7),
}  # fmt: skip
#: Stages of a Dockerfile, and PyTorch's own images: `FROM pytorch/pytorch:2.0.1-cuda11.7-cudnn8-devel AS base`.
_STAGE = lazy_pattern(r"^FROM[ \t]+(?:--\S+[ \t]+)?(\S+)(?:[ \t]+AS[ \t]+(\S+))?[ \t]*$", re.M | re.I)
_TORCH_IMAGE = lazy_pattern(r"^(?:docker\.io/)?pytorch/pytorch:(\d+\.\d[\d.]*)-", re.ASCII)
_COMMENTS = lazy_pattern(r"^[ \t]*#.*\n?", re.M)
_INSTALL = lazy_pattern(r"\b(?:pip3?|conda|mamba)[ \t]+install\b([^\n;&|]*)")
_CHANNEL = lazy_pattern(r"(?:^|\s)(?:-c|--channel)[ \t=]+\S+")
#: NVIDIA's images by year and month, and a version that was released later than the images before this one.
_IMAGE = lazy_pattern(r"\bnvcr\.io/nvidia/pytorch:(\d\d)\.(\d\d)-", re.ASCII)
_RUNS_IMAGE = lazy_pattern(r"(?i)\bdocker[ \t]+(?:run|pull)\b|\b(?:srun|enroot|singularity|apptainer)\b")
_NOT_IN_IMAGES = {
    "torch": (((20, 6), (1, 6)), ((24, 5), (2, 4))),
    "transformer_engine": (((25, 1), (2, 0)), ((25, 9), (2, 9))),
}
#: A version of a package, and what it and later ones need of others: 1.0 of accelerate, 2.0 of Lightning.
_NEEDS = {
    "accelerate": ((1, 0), {"torch": (1, 10), "huggingface-hub": (0, 21)}),
    "lightning": ((2, 0), {"torch": (1, 11)}),
    "pytorch-lightning": ((2, 0), {"torch": (1, 11)}),
}
#: One bound of a rule's `versions`.
RANGE = lazy_pattern(r"(>=|<)(\d+(?:\.\d+)*)")
_CLAUSE = lazy_pattern(r"([<>=!~^]=?=?)\s*v?(\d{1,9}(?:\.\d{1,9})*)", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Required:
    """The versions that all requirements of a package allow; None where nothing bounds them.

    low: the lowest version. below: the lowest version that is too high. cuda: the CUDA version of the required builds
    of torch (`+cu124`).
    """

    low: tuple[int, ...] | None = None
    below: tuple[int, ...] | None = None
    cuda: tuple[int, int] | None = None

    def since(self, version: tuple[int, ...]) -> bool:
        """True if no version older than this one is allowed."""
        return self.low is not None and _version(self.low) >= _version(version)

    def before(self, version: tuple[int, ...]) -> bool:
        """True if only versions older than this one are allowed."""
        return self.below is not None and _version(self.below) <= _version(version)

    def bounded(self, below: tuple[int, ...] | None) -> Required:
        """Return the same with one more upper bound, unless the requirements rule out all versions below it."""
        known = below is None or self.since(below) or self.before(below)
        return self if known else dataclasses.replace(self, below=below)

    def excludes(self, versions: str) -> bool:
        """True if no allowed version is in a range: `>=2.4`, `<2.11`, or both with a comma between them."""
        bounds = [(operator, tuple(map(int, text.split(".")))) for operator, text in RANGE.findall(versions)]
        return any(self.before(bound) if operator == ">=" else self.since(bound) for operator, bound in bounds)


def _version(parts: tuple[int, ...]) -> Version:
    """Return a version in the order of PEP 440, in which 2.4 and 2.4.0 are equal."""
    from packaging.version import Version  # only files that require a package with a version need it

    return Version(".".join(map(str, parts)))


@dataclasses.dataclass(frozen=True)
class _Patterns:
    """How files name a package: with a version, as a tag of its repository, and at all."""

    with_version: re.Pattern[str]
    tagged: re.Pattern[str]
    repository: re.Pattern[str]
    name: re.Pattern[str]

    @classmethod
    def of(cls, package: str) -> _Patterns:
        """Return the patterns of a package, with `-`, `_` and `.` as one character, and torch by conda's name too."""
        name = re.sub(r"[-_.]", "[-_.]", re.escape(package).replace(r"\-", "-").replace(r"\_", "_"))
        name = "(?:py)?torch" if package == "torch" else name
        flags = re.IGNORECASE | re.ASCII
        return cls(
            re.compile(
                rf"(?<![\w./-]){name}(?:[-_](?:torch|cu\d+))?(?:\[[\w, -]*\])?(?:[\"']?\s*=\s*[\"']|\s*[(\"']?)\s*"
                r"((?:[<>=!~^]=?=?\s*v?[\d.*]+(?:\s*,\s*)?)+)",
                flags,
            ),
            re.compile(rf"(?<![\w./-]){name}(?:\[[\w, -]*\])?\s*@\s*git\+[^\s\"'@]+@v?(\d+(?:\.\d+)*)\b", flags),
            re.compile(
                rf"git\+[^\s\"'@]+/{name.replace('[-_.]', '[-_.]?')}(?:\.git)?@v?(\d+(?:\.\d+)*)(?![\w.])", flags
            ),
            re.compile(rf"(?<![\w./-]){name}(?![\w-])", re.IGNORECASE),
        )

    def specifiers(self, text: str) -> list[str]:
        """Return the versions of the package that a text requires: `>=2.1,<2.4`, `==2.1` for a tag."""
        tags = self.tagged.findall(text) or self.repository.findall(text)
        return [*self.with_version.findall(text), *(f"=={version}" for version in tags)]


@dataclasses.dataclass
class _FolderRequirements:
    """What the files of one folder require: versions of a package, CUDA versions, images; and their texts.

    images: those of NVIDIA, by year and month. torch_images: the versions of torch of PyTorch's images.
    """

    specifiers: list[str] = dataclasses.field(default_factory=list)
    cuda: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    images: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    torch_images: list[str] = dataclasses.field(default_factory=list)
    texts: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, patterns: _Patterns) -> _FolderRequirements:
        """Read the files of a folder; instructions only where no list before them gives the package a version."""
        found = cls()
        is_listed = False
        for file in _files(folder):
            is_instruction = _is_instruction(file)
            if is_instruction and is_listed and file.suffix != ".sh":
                continue
            text = _text(file)
            found.specifiers += patterns.specifiers(text)
            found.images |= {(int(year), int(month)) for year, month in _IMAGE.findall(text)}
            found.cuda |= {(int(a or c), int(b or d)) for a, b, c, d in _CUDA.findall(text)}
            image = _torch_of_image(text) if "ockerfile" in file.name else None
            found.torch_images += [image] if image is not None else []
            found.texts.append(text)
            is_listed = is_listed or (bool(found.specifiers) and not is_instruction)
        return found


@cached_per_run
def required(folder: str, top: str, package: str) -> Required:
    """Return what the nearest files that name a package require of it, from a folder up to the top of its tree.

    Where they have no upper bound, that of files further up holds: the list of a copied example does not lift the pin
    of the project around it. What a README installs counts where no list next to it gives the package a version; what a
    script installs counts always.

    The files are searched as text: only some of them (pyproject.toml, METADATA) have requirements in the syntax that
    `packaging.requirements` reads, and the others are setup.py, Dockerfiles, and tables of Poetry and conda.
    """
    patterns = _Patterns.of(package)
    start, last = Path(folder), Path(top)
    if tracked_fs.is_file(last / "__init__.py"):  # without a pyproject.toml, setup.py is next to the package
        last = last.parent
    found: Required | None = None
    names_image = is_named = False
    for place in [start, *start.parents][:_MOST_FOLDERS]:
        here = _FolderRequirements.read(place, patterns)
        specifiers = here.specifiers
        if not specifiers:
            limit = _of_images(package, here.images, here.texts) if here.images and not names_image else None
            limit = limit or _of_environment(package, patterns.name, here.texts)
            specifiers = [f"<{'.'.join(map(str, limit))}"] if limit is not None else []
            if package == "torch" and here.torch_images:
                specifiers = [f"=={version}" for version in here.torch_images]
        names_image = names_image or bool(here.images)
        is_named = is_named or bool(here.specifiers or here.torch_images)
        if specifiers or here.cuda:
            bounds = _bounds(specifiers, next(iter(here.cuda)) if len(here.cuda) == 1 else None)
            found = bounds if found is None else found.bounded(bounds.below)
            if found.below is not None:
                break
        if place == last:
            break
    found = found or Required()
    if package == "torch" and not is_named:
        return dataclasses.replace(_of_companions(folder, top).bounded(found.below), cuda=found.cuda)
    below, needed = _NEEDS.get(package, (None, {}))
    lacks = any(required(folder, top, other).before(version) for other, version in needed.items())
    return found.bounded(below) if lacks else found


def _of_images(package: str, images: set[tuple[int, int]], texts: list[str]) -> tuple[int, ...] | None:
    """Return the version of a package that is in none of NVIDIA's images, or None.

    None, too, if a text installs the newest one: `pip install -U torch`.
    """
    if any(_installs_newest(package, text) for text in texts):
        return None
    return next((bound for first, bound in _NOT_IN_IMAGES.get(package, ()) if max(images) < first), None)


def _installs_newest(package: str, text: str) -> bool:
    """True if a text installs the newest version of a package over that of an image: `pip install -U torch`."""
    named = re.compile(rf"(?<![\w./\[-]){'(?:py)?torch' if package == 'torch' else package}(?![\w=<>~-])")
    return any(named.search(_CHANNEL.sub(" ", each)) for each in _INSTALL.findall(text))


def _torch_of_image(text: str) -> str | None:
    """Return the version of torch of the last stage of a Dockerfile, if that is an image of PyTorch."""
    if _installs_newest("torch", text):
        return None
    stages = _STAGE.findall(text)
    named = {name.lower(): image for image, name in stages if name}
    image = stages[-1][0] if stages else ""
    for _ in stages:
        image = named.get(image.lower(), image)
    found = _TORCH_IMAGE.match(image)
    return found[1] if found is not None else None


def _of_environment(package: str, named: re.Pattern[str], texts: list[str]) -> tuple[int, ...] | None:
    """Return the version of a package from which on it cannot be installed next to the required Python and CUDA.

    None if they allow all. named: its name in the texts; the CUDA version of others is that of other packages.
    """
    lowest = max(((int(a), int(b)) for text in texts for a, b in _LOWEST_PYTHON.findall(text)), default=(0, 0))
    pythons = {(int(a), int(b)) for text in texts for a, b in _PYTHON.findall(text)}
    pythons = {version for version in pythons if version >= lowest}
    builds = {
        (int(a or c), int(b or d))
        for text in texts
        if package == "torch"
        for a, b, c, d in _BUILT_WITH.findall(text)
        if (_BY_CONDA if a else named).search(text)
    }
    bounds = [
        max(without[version] for version in versions)
        for versions, without in ((pythons, _WITHOUT_PYTHON.get(package, {})), (builds, _WITHOUT_CUDA))
        if versions and versions <= without.keys()
    ]
    return min(bounds, default=None)


def _of_companions(folder: str, top: str) -> Required:
    """Return the versions of torch that belong to the required torchaudio or torchvision."""
    for package in ("torchaudio", "torchvision"):
        found = required(folder, top, package)
        low, below = _torch_with(package, found.low), _torch_with(package, found.below)
        if low is not None or below is not None:
            return Required(low, below)
    return Required()


def _torch_with(package: str, version: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the torch that a companion was released with: torchaudio 0.8 with 1.8, torchvision 0.9 with 1.8.

    From torch 2.0 on torchaudio has its version, and torchvision 0.15 came with 2.0, 0.16 with 2.1.
    """
    if version is None or len(version) < 2:
        return None
    if version[0] != 0:
        return version if package == "torchaudio" and version[0] >= 2 else None
    minor = version[1] + (0 if package == "torchaudio" else -1)
    return (1, minor, *version[2:]) if minor <= 13 else (2, minor - 14, *version[2:])


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder that may name requirements, the instructions last."""
    found = [folder / name for name in _FILES if tracked_fs.is_file(folder / name)]
    found += [folder / name for name in tracked_fs.list_names(folder, (".txt", *_LISTS)) if _NAMED.search(name)]
    for place in (folder, folder / "docker"):
        found += [place / name for name in tracked_fs.list_names(place, _OF_DOCKER) if "ockerfile" in name]
    for place in (folder, *(folder / name for name in _ENVIRONMENTS)):
        documents = tracked_fs.list_names(place, (".yml", ".yaml"))
        are_few = len(documents) <= _MOST_ENVIRONMENTS
        found += [
            place / name
            for name in documents
            if (place == folder and _ENVIRONMENT.search(name))
            or (are_few and _DEPENDENCIES.search(_text(place / name)))
        ]
    wheels = tracked_fs.list_names(folder, (".dist-info",))
    if len(wheels) == 1:  # an unpacked wheel; several are an environment
        found.append(folder / wheels[0] / "METADATA")
    for place in (folder / name for name in _FOLDERS):
        names = tracked_fs.list_names(place, (".txt",))
        found += [place / name for name in names if _NAMED.search(name) or place.name == "requirements"]
    found += [folder / name for name in tracked_fs.list_names(folder, (".sh",)) if _SETS_UP.search(name)]
    found += [folder / "README.rst"] if tracked_fs.is_file(folder / "README.rst") else []
    found += [folder / name for name in tracked_fs.list_names(folder, (".md",)) if not _NO_INSTRUCTIONS.search(name)]
    for place in (folder / name for name in _DOCUMENTS):
        found += [place / name for name in tracked_fs.list_names(place, (".md",)) if _ABOUT_INSTALLING.search(name)]
    return found


def _is_instruction(file: Path) -> bool:
    return file.suffix in (".md", ".rst", ".sh")


@cached_per_run
def _text(path: Path) -> str:
    """Return the text of a file that names requirements; of instructions, what they install, and lines that are one."""
    try:
        data = tracked_fs.read_up_to(path, _LARGEST) or b""
    except OSError:
        return ""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # of PowerShell: `pip freeze > requirements.txt`
    text = data.decode("utf-16" if wide else "utf-8", "replace").replace("\r\n", "\n")
    if path.name == "settings.ini":  # of nbdev
        return "\n".join(line for line in text.splitlines() if re.match(r"\w*requirements\b", line))
    if _is_instruction(path):
        return "\n".join((*_INSTALLS.findall(text), *(_requirements(text) if path.suffix != ".sh" else ())))
    if "ockerfile" in path.name:
        text = _COMMENTS.sub("", text).replace("\\\n", " ")
        values: dict[str, str] = dict(_DOCKER_VARIABLE.findall(text))
        return re.sub(r"\$\{?(\w+)\}?", lambda used: values.get(used[1], used[0]), text)
    if _PRINTED.match(text):
        return _ROW.sub(r"\1==\2", text)
    return text.partition("\n\n")[0] if path.name == "METADATA" else text  # the README follows


def _requirements(text: str) -> list[str]:
    """Return what a text for readers requires, each as a requirement, and the images of NVIDIA that it names."""
    text = _LINK.sub(r"\1", text)
    text = _LISTED.sub(lambda line: line[0] if _REQUIREMENT.match(line[0]) else line[0].replace(",", "\n"), text)
    lines = text.splitlines()
    literals = [each for line in lines if _INSTALLED_BY.search(line) for each in _LITERAL.findall(line)]
    images = [image[0] for line in lines if _RUNS_IMAGE.search(line) for image in _IMAGE.finditer(line)]
    between = [f"{name}>={low},{high}" for low, name, high in _BETWEEN.findall(text)]
    versions = [f"torch=={line or tagged}" for line, tagged in _TORCH_VERSION.findall(text)]
    return [*_REQUIREMENT.findall(text), *literals, *between, *versions, *images]


def _bounds(specifiers: list[str], cuda: tuple[int, int] | None) -> Required:
    """Return the widest range: a version is ruled out only where every requirement rules it out.

    `packaging` tests single versions, but has no bounds of a specifier, and reads neither Poetry's `^2.11` and `~2.11`
    nor conda's `=2.11`.
    """
    from packaging.version import Version

    lows: list[tuple[int, ...] | None] = []
    highs: list[tuple[int, ...] | None] = []
    for specifier in specifiers:
        low = below = None
        for operator, text in _CLAUSE.findall(specifier):
            version = Version(text).release
            if operator in (">=", ">", "=", "==", "===", "~=", "^"):
                low = version
            if operator in ("=", "==", "==="):
                below = (*version[:-1], version[-1] + 1)
            elif operator == "~=" and len(version) > 1:
                below = (*version[:-2], version[-2] + 1)
            elif operator == "~":  # of Poetry
                low, below = version, (*version[:1], version[1] + 1) if len(version) > 1 else (version[0] + 1,)
            elif operator == "^" and version[0]:
                below = (version[0] + 1,)
            elif operator in ("<", "<="):
                below = version if operator == "<" else (*version, 1)
        lows.append(low)
        highs.append(below)
    return Required(
        min((low for low in lows if low is not None), default=None) if None not in lows else None,
        max((high for high in highs if high is not None), default=None) if None not in highs else None,
        cuda,
    )
