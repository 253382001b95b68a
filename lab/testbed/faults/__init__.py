"""Causes faults at named points of running components, drawn by a test: a process that passes a point is killed or
stopped.

    points.py         the named points: seams that the product has anyway, and the moment before or after each
    board.py          a mapped file: the test arms a fault in it, processes count their passings there
    hooks.py          wraps the seams of a process when their modules are imported
    sitecustomize.py  what Python runs first in a process that was started with :func:`board.hook_environment`

    test --arm(point, passing, signal, victim)--> board --a process of the point's role passes it for the n-th time-->
        the signal goes to that process, or to the victim --> board: fired, by whom and when

The product knows nothing of this: nothing in its code asks for a fault, no flag turns one on, and no client can. A
process has these hooks only where its Python was started with this folder on its path.
"""
