"""Frontends (HTTP, SSE), the supervisor and the command line; none of them holds state that another would need."""
