"""Faults at named points of running components, drawn by a test: a process that passes a point is killed or stopped.

    test --arm(point, passing, signal, victim)--> board --a process of the point's role passes it for the n-th time-->
        the signal is sent to that process, or to the victim --> board: fired, by which process and when

The product has no code for this: no flag and no client can enable a fault. A process has the hooks only if this folder
is on its Python path.
"""
