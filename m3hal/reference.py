"""The reference backend: every definition, bound as it stands."""
