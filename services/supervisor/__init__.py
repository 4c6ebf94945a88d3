"""`pagekeeper serve`: starts, watches and stops the processes on this machine."""
