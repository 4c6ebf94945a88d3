"""Resumable streams: journals that any frontend reads and takes over."""
