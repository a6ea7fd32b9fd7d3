"""`inlay serve`: the HTTP server, a file a concern."""
