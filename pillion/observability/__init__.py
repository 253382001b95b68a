"""Metrics, traces and logs of every component. Open metric_catalog.py first.

Measurements are made where the measured code is; dashboards are in `deploy/grafana`.
"""
