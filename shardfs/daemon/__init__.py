"""The life cycle of one mount: start, readiness, shutdown, unmount, service manager, metrics, logs."""
