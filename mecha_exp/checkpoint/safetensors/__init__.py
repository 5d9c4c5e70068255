"""The safetensors format: headers read without trust, tensors read and written tile by tile."""
