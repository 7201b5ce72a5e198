"""``hfscale completion``: print shell completion scripts."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from .look import add_json, print_json

HELP = "print what a shell needs to complete hfscale's command lines"
DESCRIPTION = (
    "Print a script that completes subcommands, flags, their choices and the names of recipes; files everywhere else. "
    "Nothing is imported while a line is completed."
)
EXAMPLE = """eval "$(hfscale completion bash)"            # in ~/.bashrc; zsh: in ~/.zshrc, behind compinit
hfscale completion fish > ~/.config/fish/completions/hfscale.fish"""

_BASH = """_hfscale() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}} $before" in
{choices}
        *)
            case "${{COMP_WORDS[1]}}" in
{flags}
            esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _hfscale hfscale
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``hfscale completion``."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the completion script."""
    commands: Mapping[str, argparse.ArgumentParser] = arguments.commands
    text = script(arguments.shell, commands)
    if arguments.json:
        print_json({"shell": arguments.shell, "script": text})
    else:
        print(text, end="")
    return 0


def script(shell: str, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the completion script of ``shell`` for the parsers of all subcommands."""
    if shell == "fish":
        return "".join(_fish_lines(commands))
    choices, flags = [], []
    for name, parser in commands.items():
        found = _flags(parser)
        for flag, values in found.items():
            if values:
                choices.append(f'        "{name} {flag}") words="{" ".join(values)}" ;;')
        flags.append(f'            {name}) words="{" ".join([*_places(name, parser), *found])}" ;;')
    text = _BASH.format(commands=" ".join(commands), choices="\n".join(choices), flags="\n".join(flags))
    return text if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{text}"


def _flags(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Return flag -> its choices, empty if it has none."""
    usage = " ".join(parser.format_usage().split())  # the only public list of flags
    found = re.findall(r"(--[\w-]+)(?: \{([^}]*)\})?", usage)
    return {flag: choices.split(",") if choices else [] for flag, choices in found}


def _places(name: str, parser: argparse.ArgumentParser) -> list[str]:
    """Return completions of positional arguments: choices, and the recipes that ship with hfscale."""
    usage = " ".join(parser.format_usage().split())
    unnamed = re.search(r"(?:\]|hfscale \w+) \{([^}]*)\}", usage)
    found = unnamed[1].split(",") if unnamed else []
    if name in ("train", "doctor"):
        library = Path(__file__).parents[1] / "recipes" / "library"
        found += sorted(path.stem for path in library.glob("*.yaml"))
    return found


def _fish_lines(commands: Mapping[str, argparse.ArgumentParser]) -> list[str]:
    lines = []
    for name, parser in commands.items():
        text = (parser.description or "").partition(".")[0].replace("\n", " ").replace("'", "")
        lines.append(f"complete -c hfscale -n __fish_use_subcommand -f -a {name} -d '{text}'\n")
        within = f"complete -c hfscale -n '__fish_seen_subcommand_from {name}'"
        for flag, values in _flags(parser).items():
            given = f" -x -a '{' '.join(values)}'" if values else ""
            lines.append(f"{within} -l {flag.removeprefix('--')}{given}\n")
        places = _places(name, parser)
        lines += [f"{within} -a '{' '.join(places)}'\n"] if places else []
    return lines
