"""Print a script that completes mpguard's commands, options and values in a shell.

mpguard completion bash > ~/.local/share/bash-completion/completions/mpguard
mpguard completion zsh >> ~/.zshrc          # below the line that calls `compinit`
mpguard completion fish > ~/.config/fish/completions/mpguard.fish
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Sequence
from pathlib import Path

SHELLS = ("bash", "zsh", "fish")
#: The options that take a list of rule codes, separated by commas.
_CODE_LISTS = ("--select", "--extend-select", "--ignore")

#: bash splits `--option=value` into three words, where shtab's function expects two. Where shtab finds nothing,
#: `-o default` completes file names.
_BASH = """
_mpguard() {
    local before= word i words=()
    for ((i = 0; i <= COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ $word == "=" && $before == --* ]]; then
            before= word=
            if ((i < COMP_CWORD)); then continue; fi
        fi
        words+=("$word") before=$word
    done
    local COMP_WORDS=("${words[@]}") COMP_CWORD=$((${#words[@]} - 1))
    _shtab_mpguard
}
complete -o default -F _mpguard mpguard
"""
_BASH_CODE_LIST = """
_mpguard_code_list() {{
    local before=
    case $1 in *,*) before=${{1%,*}}, ;; esac
    compgen -P "$before" -W "{codes}" -- "${{1##*,}}"
}}
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", nargs="?", choices=SHELLS, default="bash", help="default: bash")


def run(options: argparse.Namespace) -> int:
    import shtab

    script = shtab.complete(_parser(options.shell), options.shell)
    if options.shell == "bash":
        script += _BASH
    elif options.shell == "zsh":
        # shtab registers the function only where the script is run by `eval`; ~/.zshrc is read as a file.
        script = script.replace("$zsh_eval_context[-1] == eval", "$zsh_eval_context[-1] == (eval|file)")
        script = re.sub(r'"\(\*\)::?', '"*:', script)  # shtab completes only the first of several arguments
    print(script)
    return 0


def _parser(shell: str) -> argparse.ArgumentParser:
    """Return one parser with every command as a subcommand, as shtab needs it."""
    from mpguard.cli import COMMANDS

    root = argparse.ArgumentParser("mpguard")
    root.add_argument("-V", "--version", action="version", help="print the version and exit")
    commands = root.add_subparsers()
    for command, summary in COMMANDS.items():
        parser = commands.add_parser(command, help=summary, description=summary)
        importlib.import_module(f"mpguard.cli.{command}").configure(parser)
        for action in parser._actions:
            _set_values(command, action)
            if shell == "zsh" and action.nargs != 0:  # `--option=` is zsh's notation for `--option value` or `=value`
                action.option_strings = [f"{s}=" if s.startswith("--") else s for s in action.option_strings]
    return root


def _set_values(command: str, action: argparse.Action) -> None:
    """Give an action the values that shtab completes: words as its choices, anything else as `complete`."""
    import shtab

    if set(_CODE_LISTS) & set(action.option_strings):
        from mpguard.lint.model.rule import rules

        action.complete = _code_list(tuple(rules()))  # type: ignore[attr-defined]
    elif action.type is Path or action.metavar in ("FILE", "PATH", "SCRIPT"):
        # shtab's own fish expression includes the `--option=` of the word, which matches no file.
        fish = r"(__fish_complete_path (commandline -ct | string replace -r '^--[^=]*=' ''))"
        action.complete = {**shtab.FILE, "fish": fish}  # type: ignore[attr-defined]
    elif action.choices is None and action.nargs != 0:
        action.choices = _words(command, action) or None


def _words(command: str, action: argparse.Action) -> Sequence[str]:
    """Return the values that an action accepts; none where they cannot be listed."""
    if isinstance(action.metavar, str) and "|" in action.metavar:
        return action.metavar.split("|")
    if command == "rule" and action.dest == "code":
        from mpguard.lint.model.rule import rules

        return (*rules(), *(rule.name for rule in rules().values()))
    if action.dest == "recipe":
        from mpguard.policy.recipes import recipes

        return tuple(recipes())
    if command == "recipes" and action.dest == "target":
        from mpguard.targets.plugin import plugins

        return tuple(plugins())
    if action.dest == "strategy":
        from mpguard.targets.plugin import STRATEGIES

        return STRATEGIES
    if action.dest == "gpu":
        from mpguard.policy.hardware import GPUS

        return tuple(GPUS)
    return ()


def _code_list(codes: Sequence[str]) -> dict[str, str | dict[str, str]]:
    """Return what completes each element of a list of codes; shtab completes only single values."""
    words = " ".join(codes)
    return {
        "bash": "_mpguard_code_list",
        "zsh": f"_sequence compadd - {words}",
        "fish": f"(__fish_append , {words})",
        "preamble": {"bash": _BASH_CODE_LIST.format(codes=words)},
    }
