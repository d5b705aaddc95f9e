"""What a person types and sees: parsing, commands, output files, the console, the git driver."""
