"""The documentation site: its navigation, its links, its code. Without mkdocs, which `make docs` runs."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

import pytest
import yaml
from limits import seconds
from paths import REPOSITORY

from mpguard.cli import main
from mpguard.targets import STRATEGIES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = REPOSITORY / "docs"


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = _module("hooks")

#: Pages as mkdocs sees them: path below docs/ -> text.
PAGES: dict[str, str] = {
    **{path.relative_to(DOCS).as_posix(): path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md"))},
    **{page: (REPOSITORY / source).read_text("utf-8") for page, source in hooks.ROOT_PAGES.items()},
}
HAND_WRITTEN = [page for page in PAGES if not page.startswith("rules/")]


class _Loader(yaml.SafeLoader):
    """Reads the tags of mkdocs' extensions as text."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda _loader, suffix, _node: suffix)

SITE: dict[str, Any] = yaml.load((REPOSITORY / "mkdocs.yml").read_text("utf-8"), _Loader)


def _listed(entry: Any) -> Iterator[str]:
    """Yield the pages of an entry of `nav`."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, list):
        for each in entry:
            yield from _listed(each)
    else:
        for each in entry.values():
            yield from _listed(each)


def test_the_navigation_lists_every_page_once() -> None:
    listed = [*_listed(SITE["nav"]), *_listed(hooks.rules_navigation())]
    assert len(listed) == len(set(listed))
    assert set(listed) == set(PAGES)


def _links(text: str) -> Iterator[str]:
    prose = re.sub(r"^```.*?^```$|`[^`\n]+`", "", text, flags=re.M | re.S)
    yield from (link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"[a-z]+:", link))


def _anchors(text: str) -> set[str]:
    """Return the anchors that mkdocs and GitHub make of the headings, where the two agree."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


@pytest.mark.parametrize("page", HAND_WRITTEN)
def test_links_lead_to_files_and_headings_that_exist(page: str) -> None:
    own = hooks.repository_path(page)
    for link in _links(PAGES[page]):
        target, _, anchor = link.partition("#")
        path = (REPOSITORY / own.parent / target).resolve() if target else REPOSITORY / own
        assert path.exists(), f"{own}: {link}"
        if anchor and path.suffix == ".md":
            assert anchor in _anchors(path.read_text("utf-8")), f"{own}: {link}"


@pytest.mark.parametrize("page", PAGES)
def test_links_on_the_site_lead_to_pages_or_to_the_repository(page: str) -> None:
    for link in _links(hooks.rewrite(page, PAGES[page])):
        target = link.partition("#")[0]
        if target:
            path = hooks._normal(PurePosixPath(page).parent / target)
            shown = str(path) in PAGES or (path is not None and path.suffix != ".md" and (DOCS / path).is_file())
            assert shown, f"{page}: {link}"


def test_links_are_rewritten_outside_of_code_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "SOURCE", "https://x.org/ours")
    text = (
        "[a](docs/limits.md#proof) `[b](docs/limits.md)` [c](examples) [d](https://x.org/y.md)\n\n"
        "```\n[e](docs/x.md)\n```\n"
    )
    assert hooks.rewrite("index.md", text) == (
        "[a](limits.md#proof) `[b](docs/limits.md)` [c](https://x.org/ours/tree/main/examples)"
        " [d](https://x.org/y.md)\n\n```\n[e](docs/x.md)\n```\n"
    )
    monkeypatch.setattr(hooks, "SOURCE", "")
    text = "[`train.py` and c](examples/train_torch.py) [a](docs/limits.md)"
    assert hooks.rewrite("index.md", text) == "`train.py` and c [a](limits.md)"
    assert hooks.site_link("guides/fsdp.md", "../../README.md") == "../index.md"
    assert hooks.site_link("guides/fsdp.md", "../gone.md") == "../gone.md", "mkdocs reports it"
    assert hooks.site_link("compare.md", "compare_example.html") == "compare_example.html"
    assert "![" in hooks.rewrite("fp8.md", PAGES["fp8.md"]), "the plot of the losses"


def test_urls_are_the_same_everywhere() -> None:
    urls = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]["urls"]
    assert SITE["site_url"] == urls["Documentation"]
    assert urls == {"Documentation": urls["Documentation"], "Changelog": f"{urls['Documentation']}changelog/"}
    assert "changelog.md" in PAGES
    assert "repo_url" not in SITE, "the repository has no public address yet; pages have placeholders for it"
    assert [page for page in HAND_WRITTEN if "github.com/mpguard" in PAGES[page]] == []


def test_the_readme_is_short_and_has_the_words_that_users_search_for() -> None:
    readme = PAGES["index.md"]
    assert len(readme.splitlines()) < 200
    before_code, code = readme.partition("\n    pip install")[::2]
    first = f"{before_code}{code.partition('<picture>')[0]}"
    assert len(first.split()) <= 120, "what, for whom, install, three commands, the proof, the cost"
    assert len(before_code.split()) < 80
    first_screen = "\n".join(readme.splitlines()[:32])
    for words in ("Accelerate", "DeepSpeed", "FSDP", "Trainer", "Is bf16/fp8 really on?", "## What hurts"):
        assert words in first_screen, words
    for strategy in STRATEGIES:
        assert f"`{strategy}`" in readme


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_recording_of_the_readme(theme: str) -> None:
    """docs/record.py makes it from two real runs; it loads nothing, and names no folder of the machine."""
    text = (DOCS / f"launch-{theme}.svg").read_text("utf-8").replace("&#160;", " ")
    for words in ("forgotten.py", "step 1 proven in force", "asked: bf16", "[status 0]", "[status 1]"):
        assert words in text, words
    assert "url(http" not in text and "/tmp" not in text and "@font-face" not in text
    assert f"docs/launch-{theme}.svg" in (REPOSITORY / "README.md").read_text("utf-8")
    assert f'"launch-{theme}.svg"' in hooks.rewrite("index.md", (REPOSITORY / "README.md").read_text("utf-8"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_recording_of_the_watch(theme: str) -> None:
    text = (DOCS / f"watch-{theme}.svg").read_text("utf-8").replace("&#160;", " ")
    for words in ("watched.py", "step 40: the loss is not finite", "21 of 60 not finite"):
        assert words in text, words
    assert "url(http" not in text and "/tmp" not in text and "@font-face" not in text
    assert f'"watch-{theme}.svg"' in PAGES["watch.md"]


@pytest.mark.parametrize("page", ["compare", "sensitivity"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_screenshots_are_small_and_shown(theme: str, page: str) -> None:
    """docs/screenshots.py takes them with a browser, which tests do not need."""
    picture = DOCS / f"{page}-{theme}.png"
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 150_000
    assert f'"../{picture.name}"' in hooks.rewrite(f"{page}.md", PAGES[f"{page}.md"])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_drawings_are_what_the_script_draws(theme: str) -> None:
    drawings = _module("drawings")
    colors = drawings.THEMES[theme]
    for name, page in (("flow", "quickstart.md"), ("packages", "architecture.md"), ("speed", "fp8.md")):
        text = (DOCS / f"{name}-{theme}.svg").read_text("utf-8")
        assert text == getattr(drawings, name)(colors), "python docs/drawings.py"
        assert f'"{name}-{theme}.svg"' in PAGES[page]
        assert f'"../{name}-{theme}.svg"' in hooks.rewrite(page, PAGES[page])
        if name == "packages":
            drawn = set(re.findall(r'font-size="15" font-weight="600">(\w+)<', text))
    rooms = {path.parent.name for path in (REPOSITORY / "mpguard").glob("*/__init__.py")}
    assert rooms == drawn


def test_what_the_page_for_beginners_types_is_what_python_prints() -> None:
    pytest.importorskip("torch", reason="the real library runs here")
    text = "\n".join(re.findall(r"^```pycon\n(.*?)^```$", PAGES["five_minutes.md"], re.M | re.S))
    examples = doctest.DocTestParser().get_doctest(text, {}, "five_minutes.md", None, 0)
    assert len(examples.examples) == 4 and doctest.DocTestRunner().run(examples).failed == 0


def test_what_the_page_for_beginners_lints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGES["five_minutes.md"]
    (program,) = re.findall(r'^```python title="train.py"\n(.*?)^```$', page, re.M | re.S)
    (shown,) = re.findall(r"^\$ mpguard lint train.py\n(.*?)\n```$", page, re.M | re.S)
    file = tmp_path / "train.py"
    file.write_text(program, "utf-8")
    assert main(["lint", str(file)]) == 0
    file.write_text(program.replace("torch.bfloat16", "torch.float16"), "utf-8")
    capsys.readouterr()
    assert main(["lint", str(file)]) == 1
    assert shown.removeprefix("train.py") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("nan loss", "watch.md"), ("gradient overflow", "watch.md"), ("not in force", "refused.md"),
        ("qlora", "guides/trainer.md"), ("qlora", "estimate.md"), ("fp8 faster", "fp8.md"),
    ],
)  # fmt: skip
def test_words_of_a_search_are_in_a_heading_of_its_page(words: str, page: str) -> None:
    """Titles weigh most in mkdocs' search, and docs/hooks.py lets guides weigh more than the many rules."""
    headings = re.findall(r"^#+ (.*)$", PAGES[page].lower(), re.M)
    assert any(all(word in heading for word in words.split()) for heading in headings), headings
    weights = {start: boost for start, boost in hooks.BOOSTS.items() if page.startswith(start)}
    assert min(weights.values(), default=1.0) > hooks.BOOSTS["rules/MPG"]


def test_a_search_for_nan_loss_finds_the_watch() -> None:
    """mkdocs' search weighs titles, of pages and of their sections, far above the text."""
    titles = [name for entry in SITE["nav"] for name in _titles(entry)]
    assert [title for title in titles if {"nan", "loss"} <= set(re.findall(r"\w+", title.lower()))] == [
        "Watch: NaN loss, gradient overflow, skipped steps"
    ]
    headings = [(page, each) for page in PAGES for each in re.findall(r"^#+ (.*)$", PAGES[page], re.M)]
    found = {page for page, each in headings if re.search(r"\bnan\b", each.lower()) and "loss" in each.lower()}
    assert "watch.md" in found


def _titles(entry: Any) -> Iterator[str]:
    """Yield the titles in an entry of `nav`."""
    if isinstance(entry, dict):
        for title, below in entry.items():
            yield title
            yield from _titles(below)
    elif isinstance(entry, list):
        for each in entry:
            yield from _titles(each)


def test_the_architecture_draws_the_rooms_that_exist() -> None:
    drawing = PAGES["architecture.md"].split("```mermaid")[1].split("```")[0]
    drawn = set(re.findall(r"^    (\w+)\[", drawing, re.M))
    package = REPOSITORY / "mpguard"
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    assert drawn == rooms | {"plugins"}


def test_the_page_of_refusals_has_every_row_of_the_proof() -> None:
    checks = [path.read_text("utf-8") for path in (REPOSITORY / "mpguard/runtime/proof/checks").glob("*.py")]
    rows = set(re.findall(r'(?:Row\(|\bname(?:, \w+)* =)\s*"([^"]+)"', "\n".join(checks)))
    assert len(rows) > 20 and {"compute", "optimizer", "fp8 weight cache"} <= rows
    headings = "\n".join(re.findall(r"^### .*$", PAGES["refused.md"], re.M))
    shown_only = {
        "accumulated values",
        "evaluation",
        "fp32 by the script",
        "reduced in fewer bits",
        "saved activations",
        "without gradient",
    }
    assert [row for row in sorted(rows - shown_only) if row not in headings] == []


#: In headings of refused.md: what stands for text that differs, and what separates messages.
_VARYING = re.compile(
    r"\.\.\.|; |\b(?:FIELD|KIND|LIBRARY|NAMES|PATTERN|N processes|[NMXY])\b"
    r"|\b(?:DEEPSPEED|MULTI_GPU|(?<=asks for )FSDP|bf16\.enabled|fp8_param and fp8_param_gather)\b"
)
#: The same in headings about a row of the proof, `ROW: what ran; asked: what the policy has`.
_VARYING_IN_ROWS = re.compile(
    rf"{_VARYING.pattern}|(?<=not proven: )(?:reduction|compute)|[:,;()\u2014]"
    r"|\b(?:or|bf16|fp32|ddp|fsdp2|deepspeed-zero2|[0-9])\b"
)


def _source_texts() -> Iterator[str]:
    """Yield the texts in the sources, without the formatted values of f-strings."""
    for path in [*(REPOSITORY / "mpguard").rglob("*.py"), *(REPOSITORY / "plugins").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_headings_of_the_page_of_refusals_are_the_words_of_the_messages() -> None:
    """Every fixed part of a heading, or of a table's first column, is in a text of the sources."""
    texts = "\n".join(_source_texts()).replace("`", "")
    missing = []
    for section in PAGES["refused.md"].split("\n## ")[1:]:
        varying = _VARYING_IN_ROWS if section.startswith("After the first step") else _VARYING
        quoted = re.findall(r"^### (.*)$|^\| (?!message |--)(.*?) \| ", section, re.M)
        for heading in ("".join(groups) for groups in quoted):
            parts = [part.strip(" :,.=") for part in varying.split(heading.replace("`", ""))]
            missing += [(heading, part) for part in parts if part not in texts]
    assert missing == []


# -- programs in the guides -------------------------------------------------------------------------------------------

PROGRAMS = {
    f"{page} {number}": code
    for page, text in PAGES.items()
    if page.startswith("guides/")
    for number, code in enumerate(re.findall(r"^```python[^\n]*\n(.*?)^```$", text, re.M | re.S), 1)
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_a_guide_compiles(name: str) -> None:
    compile(PROGRAMS[name], name, "exec")


def test_the_linter_finds_nothing_in_the_guides(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number, code in enumerate(PROGRAMS.values()):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "train.py").write_text(code)
    status = main(["lint", "--isolated", "--no-cache", "--format", "json", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert status == 0, found


@pytest.mark.parametrize("page", ["guides/axolotl.md", "guides/megatron.md"])
def test_a_guide_shows_what_is_printed(page: str, tmp_path: Path) -> None:
    """Those that need no framework."""
    text = PAGES[page]
    if "axolotl" in page:
        (tmp_path / "config.yml").write_text(
            re.findall(r'^```yaml title="config.yml"\n(.*?)^```$', text, re.M | re.S)[0]
        )
        command = [sys.executable, "-m", "mpguard", "apply", "bf16_mixed", "config.yml"]
        shown = text.split("to look first\n")[1].split("$ mpguard lint")[0]
    else:
        (tmp_path / "x.py").write_text(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)[-1])
        command = [sys.executable, "x.py"]
        shown = text.split("```text\n")[1].split("```")[0]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=seconds(100))
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown
