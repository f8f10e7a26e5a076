"""The verb `doctor`."""

from __future__ import annotations

import os
from itertools import chain

import click

from shardfs.cli.completion import profiles_and_files
from shardfs.cli.printing import echo, write_json
from shardfs.cli.source_options import CommandOptions, profile_named, source_options
from shardfs.config.parsers import absolute
from shardfs.model.exit_codes import ExitCode


@click.command()
@click.argument("argument", required=False, metavar="[SOURCE|MOUNTPOINT|PROFILE]", shell_complete=profiles_and_files)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@source_options
def doctor(argument: str | None, as_json: bool, command_options: CommandOptions) -> int:
    """Find what prevents mounts from working.

    Checks this machine and all mounts, and SOURCE if given. Each problem comes with a remedy. Exit code 1 if there is a
    problem.
    """
    from shardfs.daemon import doctor as work
    from shardfs.daemon import unmount
    from shardfs.daemon.asking import mounts
    from shardfs.daemon.health import WRONG
    from shardfs.model import redact

    options = command_options.options()
    source = argument
    if argument is not None and mounts(os.path.abspath(argument)):
        source = None  # `examine_machine` checks all mounts
    elif argument is not None and (profile := profile_named(argument, options.config)) is not None:
        source = profile.source
        options = command_options.with_profile(argument).options()
    findings = work.examine_machine(options)
    if source is not None:
        redact.add_secrets(source)
        source = absolute(source)
        profile = profile_named(options.profile, options.config) if options.profile is not None else None
        is_mounted = (
            profile is not None and absolute(profile.source) == source and unmount.is_mounted(profile.mountpoint)
        )
        findings = chain(findings, work.examine_source(source, options, is_mounted=is_mounted))
    wrong = False
    for finding in findings:
        wrong |= finding.state == WRONG
        if as_json:
            write_json(finding._asdict())
        else:
            echo(f"{finding.state:5}  {finding.check}: {finding.message}")
            if finding.fix:
                echo(f"       -> {finding.fix}")
    return ExitCode.PROBLEM if wrong else ExitCode.OK
