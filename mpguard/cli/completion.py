"""Prints a script that completes mpguard's commands, options and codes in a shell.

mpguard completion bash > ~/.local/share/bash-completion/completions/mpguard
mpguard completion zsh >> ~/.zshrc          # below `compinit`
mpguard completion fish > ~/.config/fish/completions/mpguard.fish
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import shlex
from collections.abc import Iterator

_BASH = """\
_mpguard() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words= head=
    case "$before$word" in  # bash makes three words of --option=value, zsh one
        --*=) before=${{before%=}} word= ;;
        =*) before=${{COMP_WORDS[COMP_CWORD-2]}} ;;
    esac
    case "$word" in
        --*=*) before=${{word%%=*}} head=${{word%%=*}}= word=${{word#*=}} ;;
    esac
    case "$word" in
        *,*) head=$head${{word%,*}}, word=${{word##*,}} ;;
    esac
    if [ "$COMP_CWORD" -eq 1 ]; then
        words={commands}
    else
        case "${{COMP_WORDS[1]}} $before $word" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -P "$head" -W "$words" -- "$word"))
}}
complete -o default -F _mpguard mpguard
"""
#: zsh takes scripts of bash.
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_CODES = ("--select", "--extend-select", "--ignore")
#: Commands that take files behind words that are known.
_FILES = ("apply",)


@dataclasses.dataclass(frozen=True)
class Known:
    """Something that may stand behind a command. names: of an option; none for what stands without one.

    words: its values; none where they are files, or nobody knows. value: whether one follows.
    list: several of them, with commas.
    """

    names: tuple[str, ...]
    words: tuple[str, ...]
    value: bool
    help: str
    list: bool


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", nargs="?", choices=tuple(_SHELLS), default="bash", help="default: bash")


def run(options: argparse.Namespace) -> int:
    from mpguard.cli import COMMANDS

    print(_SHELLS[options.shell]({command: list(_known(command)) for command in COMMANDS}), end="")
    return 0


def _known(command: str) -> Iterator[Known]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module(f"mpguard.cli.{command}").configure(parser)
    for action in parser._actions:
        words = _words(command, action)
        if action.option_strings or words:
            text, listed = (action.help or "").replace("%%", "%"), bool(set(_CODES) & set(action.option_strings))
            yield Known(tuple(action.option_strings), words, action.nargs != 0, text, listed)


def _words(command: str, action: argparse.Action) -> tuple[str, ...]:
    if action.choices is not None:
        return tuple(map(str, action.choices))
    if isinstance(action.metavar, str) and "|" in action.metavar:
        return tuple(action.metavar.split("|"))
    if (action.dest == "code" and command == "rule") or set(_CODES) & set(action.option_strings):
        from mpguard.lint.model.rule import rules

        known = rules()
        return (*known, *(rule.name for rule in known.values())) if command == "rule" else tuple(known)
    if action.dest == "recipe":
        from mpguard.policy.recipes import recipes

        return tuple(recipes())
    if action.dest == "target" and command == "recipes":
        from mpguard.targets.plugin import plugins

        return tuple(plugins())
    return ()


def _bash(commands: dict[str, list[Known]]) -> str:
    cases = [case for command, known in commands.items() for case in _cases(command, known)]
    return _BASH.format(commands=shlex.quote(" ".join(commands)), cases="\n".join(cases))


def _cases(command: str, known: list[Known]) -> Iterator[str]:
    """What completes an option's value; then the options; then what stands without one. Else it is a file."""
    for each in known:
        if each.words:
            yield from (_case(f"'{command} {name} '*", each.words) for name in each.names)
    yield _case(f"'{command} '*' -'*", tuple(name for each in known for name in each.names))
    yield from (_case(f"'{command} '*", each.words) for each in known if not each.names)


def _case(pattern: str, words: tuple[str, ...]) -> str:
    return f"            {pattern}) words={shlex.quote(' '.join(words))} ;;"


def _zsh(commands: dict[str, list[Known]]) -> str:
    return _ZSH + _bash(commands)


def _fish(commands: dict[str, list[Known]]) -> str:
    from mpguard.cli import COMMANDS

    lines = []
    for command, known in commands.items():
        lines.append(f"-n __fish_use_subcommand -f -a {command} -d {_quoted(COMMANDS[command])}")
        behind = f"-n '__fish_seen_subcommand_from {command}'"
        for each in known:
            names = "".join(f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}" for name in each.names)
            if names:
                lines.append(f"{behind}{names}{' -r' if each.value else ''} -d {_quoted(each.help)}")
            if each.words:
                offered = " ".join(each.words)
                offered = f"(__fish_append , {offered})" if each.list else offered
                # Files too, where what stands without an option may be one.
                only = " -x" if names else " -f" if command not in _FILES else ""
                lines.append(f"{behind}{names}{only} -a {_quoted(offered)}")
    return "".join(f"complete -c mpguard {line}\n" for line in lines)


def _quoted(text: str) -> str:
    """In the single quotes of fish, where a backslash escapes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
