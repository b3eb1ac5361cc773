"""Who sends what to whom, as pure data. No sockets."""
