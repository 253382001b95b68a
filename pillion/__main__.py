"""``python -m pillion``: the same as the ``pillion`` command. A supervisor starts components this way."""

import os

from pillion.supervisor.lifeline import tie_to_parent

# Before the servers are imported: a supervisor that dies meanwhile must not leave this process behind.
tie_to_parent()
# gRPC reads this when it is imported. Without it, its core writes some of its information to standard error as plain
# text, between lines of JSON.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from pillion.cli.app import main  # noqa: E402

if __name__ == "__main__":
    main()
