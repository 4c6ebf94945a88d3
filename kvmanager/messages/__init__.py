"""The messages by subject; import them from `kvmanager.protocol`."""
