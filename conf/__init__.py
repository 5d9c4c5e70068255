"""The Hydra configuration tree; see the README for a tour."""
