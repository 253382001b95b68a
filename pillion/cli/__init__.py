"""The `pillion` command. Open `app.py` first: it lists every command and imports what a command needs when it runs.

    app.py               the commands
    flags.py             shared options; flags from command line, environment and file, and back to argv
    reach.py             options for reaching a gateway
    help_groups.py       the groups of a command's help
    checks.py            refuses flags that cannot work
    talk.py, chat.py     generate, status; chat
    bench_command.py     bench; the load generator is :mod:`pillion.loadgen`
    events_command.py    events
    drill_command.py     drill; the drill itself is :mod:`pillion.drill`
    explain_command.py   explain; replay_commands.py has replay and canary
    certs.py, keys.py    certificates for development, API keys
    adapters_command.py  adapters
    cache_command.py     cache
    cache.py             prompts computed ahead, and pins
    models.py            models of the hub in this machine's cache
    console.py           output on standard error

No module imports a server at its top: `pillion --help` needs only the SDK's dependencies.
"""
