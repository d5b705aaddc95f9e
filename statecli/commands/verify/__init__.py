"""The command verify: the fate of each tensor when the model is moved, cast, saved, copied, trained and run."""
