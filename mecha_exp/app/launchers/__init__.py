"""Making jobs of points: all in one pass in this process, or in shares on workers."""
