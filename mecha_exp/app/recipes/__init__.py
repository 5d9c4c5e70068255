"""A configured recipe: its parameters, the statistics that it needs, and the weights of its blocks."""
