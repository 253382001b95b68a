"""The ``pillion`` command: importing any of it is light; server code is imported inside functions."""
