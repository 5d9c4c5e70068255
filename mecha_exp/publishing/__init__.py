"""What a merged model is published with: its card, and the way to a hub."""
