"""What people use in a terminal: the chat, and `pagekeeper kv`."""
