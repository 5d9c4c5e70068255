"""Parts of `evaluator=images`: pipelines of diffusers, pictures that are drawn in parts, their scores."""
