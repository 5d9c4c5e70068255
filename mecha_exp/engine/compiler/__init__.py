"""The compiler: passes over tensors, traced from plain torch, become machine code."""
