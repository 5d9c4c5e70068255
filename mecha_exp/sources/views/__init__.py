"""Models that are read otherwise than they are stored: with other rows of tokens, and under other keys."""
