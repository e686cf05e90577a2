"""The numeric contract as pure tensor functions: no files, no model, no command line."""
