"""Frontends (HTTP, SSE), the supervisor and the command line; none holds state that another would need."""
