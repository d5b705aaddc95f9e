"""The command verify: what happens to each tensor when the model is moved, cast, saved, copied, trained and run."""
