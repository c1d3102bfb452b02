"""What a user would write today, or use instead: each a process that loads the model per request."""
