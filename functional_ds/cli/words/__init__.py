"""Input and output of the command line: options as values, pages as text, errors in one line."""
