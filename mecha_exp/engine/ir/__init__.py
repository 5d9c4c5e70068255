"""The intermediate representation: what is done with one key, and the interpreter that defines the bits."""
