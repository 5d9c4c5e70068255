"""The known model configs: reading and writing their YAML, finding and detecting them."""
