"""The options in effect: those of the profile, of the environment, of `-o` and of flags. The last ones of these win."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardfs.config import loading
from shardfs.model import redact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from shardfs.config.options import Options
    from shardfs.config.profiles import Configuration, Profile


def merge(
    words: Iterable[str],
    storage: Iterable[str],
    env: Iterable[str],
    flags: Mapping[str, str | bool | None],
    warn: Callable[[str], None],
) -> tuple[Options, Profile | None]:
    """Merge profile, environment, `-o` words and flags into options; return these and the profile, None without one.

    Sets the environment variables of the option `env` in this process; those of the profile replace no existing ones.
    Has the secrets in them and in the storage options removed from all output. Raise OptionError for an invalid option,
    and for a profile that does not exist or has errors. Combinations of options are not checked.

    Args:
        words: the arguments of `-o`: `name`, `name=value`, or several of these with commas between them.
        storage: storage options, KEY=VALUE.
        env: environment variables, NAME=VALUE.
        flags: as in `loading.from_flags`.
        warn: called with each warning for the user.
    """
    above = (
        loading.from_environment(os.environ),
        loading.from_mount_options(words),
        loading.from_flags(flags, storage, env),
    )
    options = loading.merged(*above)
    profile = None
    os.environ.update(options.env)
    if options.profile is not None:
        profile = configuration(options.config, options.profile, warn).profile(options.profile)
        options = loading.merged(profile.values, *above)
        for name, value in options.env.items():  # existing variables take precedence over the profile
            os.environ.setdefault(name, value)
    redact.add_secrets("", options.storage_options, options.env)
    visible = loading.merged(*above[1:])  # on the command line and in /etc/fstab, which all users can read
    for kind, pairs in (("storage option", visible.storage_options), ("variable", visible.env)):
        for name, value in pairs.items():
            if any(redact.secrets_of("", {name: value})):
                warn(f"every user can read the {kind} {name!r} on the command line: use a profile instead")
    return options, profile


def configuration(where: str | None, name: str, warn: Callable[[str], None]) -> Configuration:
    """Read the configuration files, or only the file or directory `where`. Errors in them are not raised: `faults`.

    Calls `warn` with the warnings about files, and with those about the profile `name`.
    """
    from shardfs.config import profiles

    files = profiles.read(where)
    for fault in files.faults:
        if fault.warning and fault.profile in ("", name):
            warn(str(fault))
    return files
