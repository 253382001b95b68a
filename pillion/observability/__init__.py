"""Provides metrics, traces and logs of every component.

What is measured stays with the code that measures it; dashboards are in `deploy/grafana`.

Open metric_catalog.py first.
"""
