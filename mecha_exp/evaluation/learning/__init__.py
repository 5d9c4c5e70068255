"""Differentiable losses of a merged model: logits of evaluators, entropy, cross entropy, a user's own."""
