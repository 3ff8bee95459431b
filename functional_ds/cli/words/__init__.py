"""Words in and out of the command line: options as values, pages as text, errors in one line."""
