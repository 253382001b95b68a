"""Provides metrics, traces and logs of every component.

- `metric_catalog`: the one list of all metrics. Open it first. `metrics`: the cells that count.
- `metrics_export`: the Prometheus page and the OTLP push. `metrics_prometheus`: names on the page, vLLM's too.
- `loop_watch`: how long callbacks keep an event loop from its other work.
- `telemetry`: OpenTelemetry tracing. `log_format`: log lines as text or JSON.

What is measured stays with the code that measures it; dashboards are in `deploy/grafana`.
"""
