"""``python -m pillion`` does what the ``pillion`` command does. A supervisor starts components by this module."""

import os

from pillion.supervisor.lifeline import tie_to_parent

# This comes before the servers are imported: a supervisor that dies meanwhile must not leave this process behind.
tie_to_parent()
# gRPC reads this variable when it is imported. Without the variable its core writes some of its information to standard
# error as plain text, between lines of JSON.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from pillion.cli.app import main  # noqa: E402

if __name__ == "__main__":
    main()
