"""``python -m pillion`` equals the ``pillion`` command. A supervisor starts components by this module."""

import os

from pillion.supervisor.lifeline import tie_to_parent

# Before the imports of servers: a supervisor that dies during them must not leave this process running.
tie_to_parent()
# gRPC reads this variable at its import. Without it, gRPC writes plain text to standard error between lines of JSON.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from pillion.cli.app import main  # noqa: E402

if __name__ == "__main__":
    main()
