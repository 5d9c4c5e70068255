"""The GGUF format of llama.cpp: headers read without trust, all numbers read, plain ones and Q8_0 written."""
