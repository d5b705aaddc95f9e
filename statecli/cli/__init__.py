"""Command line: parsing, commands, output files, the console, the git driver."""
