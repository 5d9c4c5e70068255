"""The eight-task bench at a size for two cores: one encoder, eight frozen heads, eight fine-tuned experts."""
