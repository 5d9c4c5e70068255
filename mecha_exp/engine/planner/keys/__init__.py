"""What differs from key to key: missing and extra keys, values by key, keys that other keys need."""
