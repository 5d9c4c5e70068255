"""What points write: adapters, and the results in the cards of models."""
