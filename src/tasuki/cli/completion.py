"""`tasuki completion`: the script with which a shell completes words, options and files of `tasuki`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from tasuki.cli.command import argument, command
from tasuki.cli.main import root
from tasuki.cli.output import Output

SHELLS = ("bash", "zsh", "fish")


@command(
    "completion",
    examples=[
        "tasuki completion bash > ~/.local/share/bash-completion/completions/tasuki",
        "tasuki completion zsh > ~/.zfunc/_tasuki      # with fpath+=~/.zfunc before compinit in ~/.zshrc",
        "tasuki completion fish > ~/.config/fish/completions/tasuki.fish",
    ],
)
@argument("shell", metavar="bash|zsh|fish", help="The shell.", type=click.Choice(SHELLS))
def completion(output: Output, shell: str) -> None:
    made = get_completion_class(shell)
    assert made is not None
    script = made(root, {}, "tasuki", "_TASUKI_COMPLETE").source()
    output.show({"shell": shell, "script": script}, lambda: script.splitlines())
