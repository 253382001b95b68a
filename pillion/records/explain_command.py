"""Declares ``pillion explain``, which tells where the time of a recorded request went. The command imports what it
needs when it runs.
"""

from __future__ import annotations

import json

import click

from pillion.cli.flags import FlagCommand, option, options

# These options say where bundles are, and by which key they are signed, for each command that reads them.
reads_bundles = options(
    option("--record-path", "Folder in which the gateway keeps bundles.", "", envvar="PILLION_RECORD_PATH"),
    option(
        "--record-key-file",
        "File with the deployment's key. Default: record.key beside the bundle; without a key it is unverified.",
        "",
        envvar="PILLION_RECORD_KEY_FILE",
    ),
)


@click.command(cls=FlagCommand)
@click.argument("bundle", metavar="ID|FILE")
@option("--json as_json", "Print JSON.", False, is_flag=True)
@reads_bundles
def explain(bundle: str, as_json: bool, record_path: str, record_key_file: str) -> None:
    """Explain where the time of a recorded request went.

    ID is a bundle's id, or the id by which the client knows the request, and is looked for in --record-path.
    """
    from pillion.records.bundle import find, key_for, read
    from pillion.records.explanation import explained, picture

    path = find(bundle, record_path)
    found, verified = read(path, key_for(path, record_key_file))
    told = explained(found, verified)
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        click.echo("\n".join([told["title"], "", *picture(found), "", *told["sentences"]]))
