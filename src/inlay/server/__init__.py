"""The HTTP server of `inlay serve`."""
