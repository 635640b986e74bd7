"""From installed package to running kernel."""
