"""Hooks of mkdocs: pages that lie outside docs/, links that leave it, and the pages of the rules in the navigation."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

#: Web address of the repository, for links to files that are not pages; "" if it is unknown. Read the Docs sets it.
SOURCE = os.environ.get("READTHEDOCS_GIT_CLONE_URL", "").removesuffix(".git")
if not SOURCE.startswith("https://"):
    SOURCE = ""

#: Page of the site -> the file of the repository's root that it shows.
ROOT_PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}

#: How the search of the site weighs a page, by the beginning of its name: the guides come before the 190 rules.
BOOSTS = {
    "rules/MPG": 0.3,
    "rules/": 0.5,
    "changelog": 0.1,
    "gpu_tables": 0.3,
    "evidence": 0.3,
    "watch": 1.5,
    "refused": 1.5,
}

#: Inline links of Markdown to relative addresses; and code, which is matched so that links in it are skipped.
_LINK_OR_CODE = re.compile(
    r"^```.*?^```$"
    r"|\[(?P<text>(?:[^\[\]`]|`[^`\n]+`)*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)"
    r"|`[^`\n]+`",
    re.M | re.S,
)


def repository_path(page: str) -> PurePosixPath:
    """Return the file of the repository that a page of the site is made from."""
    return PurePosixPath(ROOT_PAGES.get(page, f"docs/{page}"))


def site_link(page: str, target: str) -> str:
    """Return a link on the site for a relative link in the Markdown of a page.

    Links to pages and pictures become links on the site; links to other files of the repository lead to `SOURCE`,
    and are "" if it is unknown. A link to a file that does not exist is returned unchanged: mkdocs reports it.
    """
    path = _normal(repository_path(page).parent / target)
    if path is None or not (ROOT / path).exists():
        return target
    shown = {file: name for name, file in ROOT_PAGES.items()}.get(str(path))
    if shown is None and path.parts[0] == "docs" and path.suffix in (".md", ".html", ".svg", ".png"):
        shown = str(path.relative_to("docs"))
    if shown is not None:
        return "../" * (len(PurePosixPath(page).parts) - 1) + shown
    return SOURCE and f"{SOURCE}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"


def rewrite(page: str, markdown: str) -> str:
    """Return the Markdown of a page with its relative links as `site_link` has them; without an address, only text."""

    if page == "index.md":  # pictures of the README are in this folder
        markdown = markdown.replace('srcset="docs/', 'srcset="').replace('src="docs/', 'src="')
    else:  # mkdocs serves a page as a folder, and does not rewrite HTML
        up = "../" * len(PurePosixPath(page).parts)
        markdown = re.sub(r'(src|srcset)="([\w-]+\.(?:svg|png))"', rf'\1="{up}\2"', markdown)

    def rewritten(match: re.Match[str]) -> str:
        if match["target"] is None:
            return match[0]
        target = site_link(page, match["target"])
        return f"[{match['text']}]({target}{match['anchor'] or ''})" if target else match["text"]

    return _LINK_OR_CODE.sub(rewritten, markdown)


def _normal(path: PurePosixPath) -> PurePosixPath | None:
    """Return a path without `..`; None if it leaves the repository."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and not parts:
            return None
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return PurePosixPath(*parts) if parts else None


def rules_navigation() -> list[Any]:
    """Return the pages of the rules by group, as an entry of mkdocs' `nav` has them."""
    groups: dict[str, list[Any]] = {}
    for path in sorted((ROOT / "docs" / "rules").glob("MPG*.md")):
        title = path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        name = re.sub(r"^(.*) \((MPG\d+)\)$", r"\2 \1", title)
        groups.setdefault(f"{path.stem[:4]}xx", []).append({name: f"rules/{path.name}"})
    return [{group: pages} for group, pages in groups.items()]


# -- called by mkdocs -------------------------------------------------------------------------------------------------


def on_config(config: Any) -> Any:
    """Put the pages of the rules below their index."""
    for section in config.nav:
        for entry in section.get("Linter", []):
            if isinstance(entry, dict) and "Rules" in entry:
                entry["Rules"] = [entry["Rules"], *rules_navigation()]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie in the root of the repository."""
    from mkdocs.structure.files import File

    for page, source in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links that are right in the repository, and not on the site; weigh the page for the search."""
    name = page.file.src_uri
    page.meta["search"] = {"boost": next((boost for start, boost in BOOSTS.items() if name.startswith(start)), 1.0)}
    return rewrite(page.file.src_uri, markdown)


if __name__ == "__main__":
    sys.exit("docs/hooks.py is run by mkdocs: `make docs`")
