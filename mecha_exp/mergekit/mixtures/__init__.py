"""Dense models as the experts of one model: mergekit-moe's configurations."""
