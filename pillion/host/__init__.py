"""Resources shared by the processes of one machine.

    cores.py                cores that a process may use, and background threads that yield to others
    core_lending_table.py   shared memory by which the workers of one host lend each other cores
    locks.py                file locks that end with their process
    adapter_folders.py      location of cached adapters, and their eviction

Independent of requests.
"""
