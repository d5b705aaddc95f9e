"""Programs that search for inputs which break what statecli promises: CONTRIBUTING.md, "Fuzzing"."""
