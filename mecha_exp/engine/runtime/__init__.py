"""Running a plan: workers, kernels, buffers, and going on where an interrupted run stopped."""
