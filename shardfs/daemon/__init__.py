"""The life of one mount: start, readiness, shutdown, unmount, service manager, metrics, logs."""
