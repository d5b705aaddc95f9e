"""`statecli fix`: edit the source of a model class, and keep an edit only if `verify` proves the edit."""
