"""Machine code that no method spells out: what loops call, the stream from file to file, the sort of rows."""
