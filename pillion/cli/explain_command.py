"""`pillion explain`, which shows where the time of a recorded request went. Imports what it needs when it runs."""

from __future__ import annotations

import json

import click

from pillion.cli.flags import FlagCommand, option, options

reads_bundles = options(
    option(
        "--record-path",
        "Folder with the gateway's bundles, or redis: the Redis of --redis-url.",
        "",
        envvar="PILLION_RECORD_PATH",
    ),
    option("--redis-url", "The cluster's Redis.", "", envvar="PILLION_REDIS_URL"),
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
def explain(bundle: str, as_json: bool, record_path: str, record_key_file: str, redis_url: str) -> None:
    """Explain where the time of a recorded request went.

    ID is a bundle's id or the client's request id, and is looked up in --record-path.
    """
    from pillion.gateway.recorder.record_store import read_named
    from pillion.records.explanation import explained, picture

    record, verified = read_named(bundle, record_path, record_key_file, redis_url)
    explanation = explained(record, verified)
    if as_json:
        click.echo(json.dumps(explanation, indent=2))
    else:
        click.echo("\n".join([explanation["title"], "", *picture(record), "", *explanation["sentences"]]))
