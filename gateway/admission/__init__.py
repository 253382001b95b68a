"""Admission decides who may send requests, how many at once, and which is next. Open admission.py first.

No request is planned or run here.
"""
