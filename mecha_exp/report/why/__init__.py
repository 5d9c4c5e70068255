"""What moved the metric of a sweep: effects of its keys, shares of its variance, Shapley values."""
