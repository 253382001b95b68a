"""Causes faults at named points of running components, drawn by a test: a process that passes a point is killed or
stopped.

    test --arm(point, passing, signal, victim)--> board --a process of the point's role passes it for the n-th time-->
        the signal goes to that process, or to the victim --> board: fired, by whom and when

The product knows nothing of this: nothing in its code asks for a fault, no flag turns one on, and no client can. A
process has these hooks only where its Python was started with this folder on its path.
"""
