"""Installs the fault hooks: Python imports this file first in a process with this folder on its path."""

import os
import sys

from lab.testbed.faults.board import BOARD_VARIABLE
from lab.testbed.faults.hooks import change_defaults, install, role_of, wait_for_redis

_role = role_of(sys.orig_argv)
if _role and BOARD_VARIABLE in os.environ:
    install(_role)
    wait_for_redis()
if _role:
    change_defaults()
