"""The GGUF format of llama.cpp: headers read without trust, plain numbers and Q8_0 read and written."""
