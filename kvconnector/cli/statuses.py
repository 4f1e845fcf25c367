"""Exit statuses of the commands."""

EXIT_FAULT, EXIT_ERROR, EXIT_INTERRUPTED = 1, 2, 130
"""A fault was found, or a benchmark's result was wrong; wrong usage, or an error that the text names; interrupted."""
