"""Shell completion of values: profiles, verbs, options and their choices. Errors in configuration files are ignored."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardfs.config import loading, options

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import click
    from click.shell_completion import CompletionItem

    Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
    """A completion function of click. Its last argument is the beginning of the value."""


def starting_with(incomplete: str, words: Iterable[str]) -> list[CompletionItem]:
    """The words that start with `incomplete`, in their order."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(word) for word in words if word.startswith(incomplete)]


def kind(name: str) -> Complete:
    """A completion function that has the shell complete paths; `name` is "file", for all paths, or "dir".

    `click.Path` would access the path, which blocks if the path is a hanging mount.
    """

    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type=name)]

    return complete


def profiles(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completion function: the names of profiles in the configuration files."""
    from shardfs.config.profiles import read

    return starting_with(incomplete, read(os.environ.get("SHARDFS_CONFIG")).profiles)


def profiles_and_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completion function: names of profiles, and paths."""
    return [*profiles(ctx, param, incomplete), *kind("file")(ctx, param, incomplete)]


def setting_values(setting: options.Setting) -> Complete | None:
    """Completion function for the value of an option; None if the value has no known choices."""
    if setting.name == "profile":
        return profiles
    if setting.choices:
        return lambda _ctx, _param, incomplete: starting_with(incomplete, setting.choices)
    return {"PATH": kind("file"), "DIRECTORY": kind("dir")}.get(setting.value)


def mount_options(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Completion function for the argument of `-o`: completes the option after the last comma, with its choices."""
    options_before = incomplete.rpartition(",")[0]
    return starting_with(incomplete, (f"{options_before},{word}" if options_before else word for word in _words()))


def _words() -> Iterator[str]:
    for setting in options.settings():
        if setting.choices:
            yield from (f"{setting.name}={choice}" for choice in setting.choices)
        elif setting.name != "rw":  # mount(8) adds `rw` automatically, so `-o rw` has no effect
            yield setting.name + ("=" if setting.value else "")
    yield from (*loading.ACCESS, *loading.FORWARDED, "storage_option.", "env.")


def register() -> None:
    """Replace the completion of click for bash and fish, which split arguments of `-o` at `=` and `,`."""
    from click.shell_completion import BashComplete, FishComplete, add_completion_class

    class Bash(BashComplete):
        """Joins words that bash splits at `=`, and completes only the part after `=`, which bash replaces."""

        replaced = ""

        def get_completion_args(self) -> tuple[list[str], str]:
            words, incomplete = super().get_completion_args()
            joined: list[str] = []
            for word in (*words, incomplete):
                if joined and (word == "=" or (joined[-1].endswith("=") and self.replaced)):
                    joined[-1] += word
                    self.replaced = joined[-1].rpartition("=")[0] + "="
                else:
                    joined.append(word)
                    self.replaced = ""
            return joined[:-1], joined[-1]

        def format_completion(self, item: CompletionItem) -> str:
            item.value = item.value.removeprefix(self.replaced)
            return super().format_completion(item)

    class Fish(FishComplete):
        """Keeps commas in values: click's fish script splits a completion at every comma."""

        source_template = FishComplete.source_template.replace('string split ","', 'string split --max 1 ","')

    add_completion_class(Bash, "bash")
    add_completion_class(Fish, "fish")
