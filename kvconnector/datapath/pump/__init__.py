"""The pump: the packed path without the GIL between chunks."""
