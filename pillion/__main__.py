"""``python -m pillion``: the same as the ``pillion`` command. A supervisor starts components this way."""

from pillion.supervisor.lifeline import tie_to_parent

# Before the servers are imported: a supervisor that dies meanwhile must not leave this process behind.
tie_to_parent()

from pillion.cli.app import main  # noqa: E402

if __name__ == "__main__":
    main()
