"""Holds what the processes of one machine share.

    cores.py                which of the machine's cores a process may use, and threads that leave them to others
    core_lending_table.py   shared memory by which the workers of one host lend each other cores
    locks.py                locks that end with the process that has them
    adapter_folders.py      where copies of adapters lie, and when old ones go

Nothing here knows of requests.
"""
